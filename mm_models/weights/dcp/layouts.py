"""The expert layout of a DCP folder: said by its manifest, by the caller or by the seeds' variable; then checked against the
shapes. It is never read off the shapes: `stacked` and `stacked_hf` have the same names and may have the same shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mm_models.errors import UserError
from mm_models.weights.boxes import Shape
from mm_models.weights.model_map import WeightMap
from mm_models.weights.rules import FILE_LAYOUTS

VARIABLE = "GLM4V_DCP_3D"
"""The seeds' switch: `1` means `stacked`, unset means `flat`."""


def check_known(expert_layout: str) -> str:
    if expert_layout not in FILE_LAYOUTS:
        raise UserError(f"expert layout {expert_layout!r} is not known. Known: {', '.join(FILE_LAYOUTS)}.")
    return expert_layout


def from_variable(environ: Mapping[str, str] | None = None) -> str:
    """What `GLM4V_DCP_3D` says; anything but `1` or unset is refused."""
    value = (os.environ if environ is None else environ).get(VARIABLE)
    if value not in (None, "1"):
        raise UserError(f"{VARIABLE} is {value!r}; it takes 1 (experts stacked) or is unset (experts flat).")
    return "stacked" if value == "1" else "flat"


def declared(expert_layout: str | None, environ: Mapping[str, str] | None = None) -> str:
    """The layout that was given, or what the variable says; a set variable that contradicts what was given is refused."""
    said = from_variable(environ)
    if expert_layout is None:
        return said
    check_known(expert_layout)
    if said == "stacked" and expert_layout != "stacked":
        raise UserError(
            f"{VARIABLE}=1 means expert layout stacked, but {expert_layout} was asked for. Unset it, or ask for stacked."
        )
    return expert_layout


def chosen(expert_layout: str | None, wmap: WeightMap, *, by_variable: bool = False) -> str:
    """The layout to write: the one that was given, else the FSDP2 target's own or, `by_variable`, what the variable says.

    A model without experts has no layout: all are one, and one that was given is refused.
    """
    if not wmap.has_experts:
        return without_experts(expert_layout)
    return declared(expert_layout if expert_layout or by_variable else "stacked_hf")


def without_experts(expert_layout: str | None) -> str:
    """What a model without experts is recorded as; refused where a layout was given."""
    if expert_layout is not None:
        raise UserError(f"expert layout {expert_layout} was given, but the model has no experts. Leave it out.")
    return "stacked_hf"


def check_shapes(
    shapes: Mapping[str, Shape], wmap: WeightMap, expert_layout: str, *, folder: Path, dcp_prefix: str, said: str
) -> None:
    """Refuse expert tensors of another layout than the one that was declared, naming both, both shapes and the commands.

    `shapes` are the folder's tensors by Hugging Face name; `said` is who declared the layout.
    """
    expected = {layout: wmap.hf(layout) for layout in FILE_LAYOUTS}
    names = {layout: expert_names(wmap, layout) for layout in FILE_LAYOUTS}
    here = expected[expert_layout]
    wrong = [name for name in names[expert_layout] if name in shapes and shapes[name] != here[name].shape]
    others = set().union(*names.values()) - names[expert_layout]
    foreign = sorted(name for name in shapes if name in others)
    if not wrong and not foreign:
        return
    name = sorted(wrong)[0] if wrong else foreign[0]
    fits = [
        layout for layout in FILE_LAYOUTS if name in expected[layout] and expected[layout][name].shape == shapes[name]
    ]
    wanted = f"{here[name].shape}" if name in here else f"no such name, but {sorted(names[expert_layout])[0]}"
    declare = f" Declare {fits[0]} (--expert-layout {fits[0]}, or model.expert_layout in the YAML). Or:" if fits else ""
    raise UserError(
        f"{folder}: {name} is {shapes[name]}, which is expert layout {' or '.join(fits) or 'none that is known'}; "
        f"{expert_layout} was expected ({said}), which is {wanted}.{declare} "
        f"{reconvert(folder, expert_layout, dcp_prefix, fits[0] if fits else 'LAYOUT')}"
    )


def expert_names(wmap: WeightMap, expert_layout: str) -> set[str]:
    """The names of expert tensors in one layout: those that the other way of naming does not have."""
    other = "per_expert" if expert_layout != "per_expert" else "stacked_hf"
    return set(wmap.hf(expert_layout)) - set(wmap.hf(other))


def reconvert(folder: Path | str, expert_layout: str = "stacked_hf", dcp_prefix: str = "", have: str = "LAYOUT") -> str:
    """The commands that bring a DCP folder into another expert layout or prefix."""
    prefix = f' --dcp_prefix "{dcp_prefix}"' if dcp_prefix else ""
    return (
        f"Convert it: mm-convert dcp_to_hf --dcp {folder} --hf HF_FOLDER --out NEW_HF --expert-layout {have}{prefix}, then "
        f"mm-convert hf_to_dcp --hf NEW_HF --out NEW_DCP --expert-layout {expert_layout}"
    )
