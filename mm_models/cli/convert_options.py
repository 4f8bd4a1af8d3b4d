"""What the verbs of `mm-convert` share: the options of a layout, of a run, of an output, and what they become."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mm_models.cli.convert_field import check_vision_tp
from mm_models.cli.parser import StrictParser, layer_lists, natural, positive
from mm_models.errors import UserError

LAYOUT_NAMES = ("tp", "pp", "vpp", "ep", "etp", "llm_pp_layers", "vit_pp_layers")


@dataclass(frozen=True, kw_only=True)
class Verb:
    """`run` carries out parsed arguments and returns the exit status; `add` declares the options."""

    help: str
    add: Callable[[StrictParser], None]
    run: Callable[[argparse.Namespace], int]


def layout_options(parser: StrictParser, section: str, prefix: str = "", what: str = "") -> None:
    """The layout of one side: short names, and the field's under `--cfg.<section>.`"""
    group = parser.add_argument_group(f"layout{what}")

    def add(short: str, long: str | None, kind: Callable, text: str) -> None:
        names = [f"--{prefix}{short}", *([f"--cfg.{section}.{long}"] if long else [])]
        group.add_argument(
            *names,
            dest=f"{prefix}{short}".replace("-", "_"),
            type=kind,
            default=None,
            help=text,
            metavar="N" if kind is positive else "LISTS",
        )

    add("tp", "tp_size", positive, "tensor parallel")
    add("pp", None, positive, "pipeline stages (default: from the layer lists)")
    add("vpp", None, positive, "virtual chunks per stage (default: from the layer lists)")
    add("ep", "ep_size", positive, "expert parallel")
    add("etp", "etp_size", positive, "expert tensor parallel (default: tp)")
    add(
        "llm-pp-layers",
        "llm_pp_layers",
        layer_lists,
        "decoder layers per stage: '[12,16]', or one list per virtual chunk (default: balanced)",
    )
    add("vit-pp-layers", "vit_pp_layers", layer_lists, "vision layers per stage (default: all on the first)")


def run_options(parser: StrictParser) -> None:
    parser.add_argument(
        "--jobs",
        type=positive,
        default=None,
        metavar="N",
        help="worker threads (default: the machine's cores, at most 8)",
    )
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="PATH_OR_MODULE", help="adds registry entries; may be repeated"
    )


def bounds_options(parser: StrictParser) -> None:
    """The pixel bounds of the processor that is written, under their names in data.json."""
    for which, kind in (("min", natural), ("max", positive)):
        parser.add_argument(
            f"--image-{which}-pixels",
            type=kind,
            metavar="N",
            help="bound of an image after resizing that the processor is to have (default: that of training, else of --hf)",
        )


def write_options(parser: StrictParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder of this tool")
    run_options(parser)


def target(args: argparse.Namespace, section: str, prefix: str = ""):
    """The layout that the options of `section` ask for. `pp` and `vpp` follow from the layer lists where they are not given."""
    from mm_models.layout import ParallelLayout
    from mm_models.weights.verbs import Target

    given = {name: getattr(args, prefix + name) for name in LAYOUT_NAMES}
    lists = given["llm_pp_layers"] or given["vit_pp_layers"]
    nested = bool(lists) and all(isinstance(row, list) for row in lists)
    vpp = given["vpp"] or (len(lists) if nested else 1)
    pp = given["pp"] or (len(lists[0]) if nested else len(lists) // vpp if lists else 1)
    check_vision_tp(args, section, given["tp"] or 1)
    degrees = {"tp": given["tp"] or 1, "pp": pp, "vpp": vpp, "ep": given["ep"] or 1, "etp": given["etp"]}
    return Target(
        layout=ParallelLayout(**degrees), vision_layers=given["vit_pp_layers"], text_layers=given["llm_pp_layers"]
    )


def source(args: argparse.Namespace, section: str, prefix: str = ""):
    """The checkpoint to read: by its manifest, whose layout must be the one given, if one is; or a folder of the field."""
    from mm_models.weights.foreign import is_foreign, open_foreign
    from mm_models.weights.manifest import open_checkpoint

    if is_foreign(args.mm, args.iteration):
        asked, model = target(args, section, prefix), _model(args)
        return open_foreign(args.mm, model, asked.layout, asked.vision_layers, asked.text_layers, args.iteration)
    checkpoint = open_checkpoint(args.mm, args.iteration)
    _check_given_layout(args, section, prefix, checkpoint)
    return checkpoint


def _model(args: argparse.Namespace):
    """The model of a folder of the field: model.json's, else that of the Hugging Face folder beside it."""
    from mm_models.config.family import family_of
    from mm_models.config.model import load_model_config
    from mm_models.config.strict import load_json
    from mm_models.weights.hffolder import CONFIG

    if args.model is not None:
        return load_model_config(args.model)
    if getattr(args, "hf", None) is None:
        raise UserError(
            f"{args.mm}: has no manifest (a folder of the field). Give --model model.json and the layout it was written in."
        )
    config, where = load_json(Path(args.hf) / CONFIG), f"{args.hf}/{CONFIG}"
    return family_of(config, where).model(config, where)


def _check_given_layout(args: argparse.Namespace, section: str, prefix: str, checkpoint) -> None:
    """Layout options of a checkpoint that has a manifest are a statement about it: refused when it is wrong."""
    given = {name: getattr(args, prefix + name) for name in LAYOUT_NAMES}
    check_vision_tp(args, section, given["tp"] or checkpoint.manifest.layout.tp)
    if all(value is None for value in given.values()):
        return
    asked, manifest = target(args, section, prefix), checkpoint.manifest
    if given["llm_pp_layers"] or given["vit_pp_layers"]:
        given |= {"pp": asked.layout.pp, "vpp": asked.layout.vpp}
    differs = [
        f"{name} {given[name]} given, {getattr(manifest.layout, name)} there"
        for name in ("tp", "pp", "vpp", "ep", "etp")
        if given[name] not in (None, getattr(manifest.layout, name))
    ]
    for name, split in (("llm_pp_layers", manifest.split.text), ("vit_pp_layers", manifest.split.vision)):
        if (
            given[name]
            and split
            and [n for row in given[name] for n in (row if isinstance(row, list) else [row])] != list(split.flat)
        ):
            differs.append(f"{name} {given[name]} given, {split.nested()} there")
    if differs:
        raise UserError(
            f"{checkpoint.folder}: its layout is not the one given: {'; '.join(differs)}. Leave the options out, or correct them."
        )


def options(args: argparse.Namespace):
    from mm_models.cli.progress import progress_bar
    from mm_models.config.bounds import Bounds
    from mm_models.weights.verbs import Options

    return Options(
        jobs=args.jobs,
        overwrite=args.overwrite,
        progress=progress_bar if sys.stderr.isatty() else None,
        bounds=Bounds.of(vars(args)),
    )
