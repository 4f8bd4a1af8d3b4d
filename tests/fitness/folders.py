"""A registered family's folders, FSDP2 model, plans and positions against Hugging Face's: faults, in words, of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from mm_models.config.family import Family
from mm_models.config.fsdp2.run import load_config
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.fsdp2.outline import outline
from mm_models.fsdp2.plans import resolve_plans
from mm_models.layout import ParallelLayout
from mm_models.registry import table
from mm_models.weights import verbs
from mm_models.weights.model_map import build
from tests.fitness.registered import tiny_name
from tests.models import FAMILIES, tiny_config
from tests.weights.folders import QUIET, assert_same_folder, hf_folder, to_hf

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGE, START, END, PAD = 300, 302, 303, 0


def round_trip(family: Family, model: ModelConfig, folder: Path) -> None:
    """Hugging Face -> TP2 · PP2 -> Hugging Face, every file byte for byte. Raises what the conversion or the comparison says."""
    hf = hf_folder(folder / "hf", family=tiny_name(family))
    (folder / "model.json").write_text(model.model_dump_json(exclude_none=True))
    layers, half = model.text.num_layers, model.vision.num_layers // 2
    target = verbs.Target(
        layout=ParallelLayout(tp=2, pp=2), vision_layers=[half, model.vision.num_layers - half], text_layers=[0, layers]
    )
    verbs.hf_to_mm(hf, folder / "mm", target, model_json=folder / "model.json", options=QUIET)
    assert_same_folder(to_hf(folder / "mm", hf, folder / "back"), hf)


def fsdp2_faults(family: Family, model: ModelConfig) -> Iterator[str]:
    """Names and shapes of the assembly on the meta device against the weight map's Hugging Face side."""
    shape = outline_of(family)
    have = dict(shape.parameters)
    for name, size in shape.buffers.items():
        have |= {name: size} if name.endswith(tuple(_persistent(family))) else {}
    want = {name: tensor.shape for name, tensor in build(model, family.prefixes).hf("stacked_hf").items()}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            yield f"{name} is {have.get(name)} in the model, {want.get(name)} in the map"


def _persistent(family: Family) -> set[str]:
    """Last words of the names of Hugging Face's persistent buffers."""
    model = _meta(family)
    buffers = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    return {name.rsplit(".", 1)[-1] for name in buffers}


def _meta(family: Family):
    import transformers

    name = tiny_name(family)
    with torch.device("meta"):
        return getattr(transformers, FAMILIES[name].model)(tiny_config(name))


def outline_of(family: Family):
    return outline(
        family.model_id, tiny_config(tiny_name(family)).to_dict(), platform="cpu", expert_layout="stacked_hf"
    )


def shipped(family: Family) -> list[Path]:
    """The YAML files under examples/ whose model.model_id is the family's."""
    return [path for path in sorted(EXAMPLES.glob("*/*.yaml")) if load_config(path).model.model_id == family.model_id]


def plan_faults(family: Family, path: Path) -> Iterator[str]:
    """What a file's plans leave out or name wrongly, resolved against the tiny model."""
    shape = outline_of(family)
    try:
        plans = resolve_plans(load_config(path), shape)
    except UserError as error:
        yield str(error)
        return
    inside = {name for module in (*plans.fsdp, *plans.ep) for name in shape.parameters_of(module)}
    yield from (f"{name}: in no module of fsdp_plan or ep_plan" for name in shape.parameters if name not in inside)
    experts = {name for name, size in shape.parameters.items() if ".experts." in name}
    held = {name for module in plans.ep for name in shape.parameters_of(module)}
    yield from (f"{name}: of an expert, in no module of ep_plan" for name in sorted(experts - held))
    if not plans.recompute:
        yield "features.recompute_plan: nothing is recomputed"


SAMPLES = (
    ([9], []),
    ([2, (1, 4, 4), 3], [(1, 4, 4)]),
    ([1, (1, 2, 8), (1, 6, 4), 2], [(1, 2, 8), (1, 6, 4)]),
)
"""Lengths of text and grids of images of one row each, the grids once more."""


def position_faults(family: Family, decoder: str) -> Iterator[str]:
    """The decoder's position function against Hugging Face's `get_rope_index`: text, one and two images, padding on both sides."""
    function, model = table("positions").get(decoder), _meta(family).model
    merge = tiny_config(tiny_name(family)).vision_config.spatial_merge_size
    rows, grids = [], []
    for parts, images in SAMPLES:
        ids: list[int] = []
        for part in parts:
            count = part if isinstance(part, int) else part[1] * part[2] // merge**2
            ids += range(10, 10 + count) if isinstance(part, int) else [START, *[IMAGE] * count, END]
        rows.append(ids)
        grids += images
    length = max(map(len, rows))
    for side in ("left", "right"):
        ids = torch.full((len(rows), length), PAD)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            where = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
            ids[at, where], mask[at, where] = torch.tensor(row), 1
        grid = torch.tensor(grids)
        expected, _ = model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grid, attention_mask=mask)
        found = function(ids, mask, grid, image_token_id=IMAGE, spatial_merge_size=merge)
        if not torch.equal(found, expected):
            yield f"{decoder}: positions differ from Hugging Face's, padding on the {side}"


def changed(path: Path, out: Path, old: str, new: str) -> Path:
    """A copy of a YAML file with one text replaced everywhere."""
    text = path.read_text()
    assert old in text, (path, old)
    out.write_text(text.replace(old, new))
    return out
