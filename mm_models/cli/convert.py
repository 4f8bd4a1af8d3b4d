"""`mm-convert`: weights between Hugging Face folders and checkpoints of the Megatron target, in any layout.

    mm-convert hf_to_mm --hf HF --out DIR [--tp 2 --pp 2 --ep 2 ...]
    mm-convert mm_to_hf --mm DIR --hf REFERENCE --out NEW_HF
    mm-convert resplit  --mm DIR --out NEW_DIR [--tp 1 --pp 4 ...]
    mm-convert check A B | inspect DIR | patterns MODEL_ID

Every option has the field's spelling too, usable after the converter's name:

    mm-convert Glm4vMoeConverter hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir HF --cfg.parallel_config.tp_size 2 \
        --cfg.parallel_config.llm_pp_layers '[[2,2]]' --cfg.parallel_config.vit_pp_layers '[[2,0]]'

Without a converter's name the family is found from the folder. Neither torch nor transformers is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_models.cli.parser import StrictParser, finish, layer_lists, positive
from mm_models.errors import UserError, nearest

PROG = "mm-convert"
LAYOUT_NAMES = ("tp", "pp", "vpp", "ep", "etp", "llm_pp_layers", "vit_pp_layers")


@dataclass(frozen=True, kw_only=True)
class Verb:
    """`run` carries out parsed arguments and returns the exit status; `add` declares the options."""

    help: str
    add: Callable[[StrictParser], None]
    run: Callable[[argparse.Namespace], int]


# --- options ------------------------------------------------------------------------------------------------------


def _layout_options(parser: StrictParser, section: str, prefix: str = "", what: str = "") -> None:
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


def _run_options(parser: StrictParser) -> None:
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


def _write_options(parser: StrictParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder of this tool")
    _run_options(parser)


def _hf_to_mm_options(parser: StrictParser) -> None:
    parser.add_argument(
        "--hf", "--cfg.hf_config.hf_dir", dest="hf", required=True, metavar="DIR", help="Hugging Face folder to read"
    )
    parser.add_argument(
        "--out", "--cfg.mm_dir", dest="out", required=True, metavar="DIR", help="checkpoint folder to write (release/)"
    )
    parser.add_argument(
        "--model", metavar="FILE", help="model.json to convert for; refused where it disagrees with config.json"
    )
    _layout_options(parser, "parallel_config")
    _write_options(parser)


def _mm_to_hf_options(parser: StrictParser) -> None:
    parser.add_argument(
        "--mm", "--cfg.mm_dir", dest="mm", required=True, metavar="DIR", help="checkpoint folder to read"
    )
    parser.add_argument(
        "--hf",
        "--cfg.hf_config.hf_dir",
        dest="hf",
        required=True,
        metavar="DIR",
        help="reference folder: names, shards, tokenizer",
    )
    parser.add_argument(
        "--out", "--cfg.save_hf_dir", dest="out", required=True, metavar="DIR", help="Hugging Face folder to write"
    )
    parser.add_argument(
        "--iteration", metavar="N", help="which checkpoint (a number or 'release'; default: the tracker's)"
    )
    parser.add_argument("--like-reference", action="store_true", help="cast to the reference's data types")
    parser.add_argument("--drop-extra", action="store_true", help="leave out tensors the architecture does not hold")
    parser.add_argument("--model", metavar="FILE", help="model.json, for a folder of the field that has no manifest")
    _layout_options(
        parser, "parallel_config", what=" of the checkpoint (checked against its manifest; needed without one)"
    )
    _write_options(parser)


def _resplit_options(parser: StrictParser) -> None:
    parser.add_argument(
        "--mm", "--cfg.source_dir", dest="mm", required=True, metavar="DIR", help="checkpoint folder to read"
    )
    parser.add_argument(
        "--out", "--cfg.target_dir", dest="out", required=True, metavar="DIR", help="checkpoint folder to write"
    )
    parser.add_argument(
        "--iteration", metavar="N", help="which checkpoint (a number or 'release'; default: the tracker's)"
    )
    parser.add_argument("--model", metavar="FILE", help="model.json, for a folder of the field that has no manifest")
    _layout_options(parser, "target_parallel_config", what=" to write")
    _layout_options(
        parser,
        "source_parallel_config",
        prefix="source-",
        what=" of the source (checked against its manifest; needed without one)",
    )
    _write_options(parser)


def _check_options(parser: StrictParser) -> None:
    parser.add_argument("a", metavar="A", help="a Hugging Face or checkpoint folder")
    parser.add_argument("b", metavar="B", help="another")
    _run_options(parser)


def _inspect_options(parser: StrictParser) -> None:
    parser.add_argument("folder", metavar="DIR")
    _run_options(parser)


def _patterns_options(parser: StrictParser) -> None:
    parser.add_argument("model_id", metavar="MODEL_ID", help="an id of the table weight_maps")
    _run_options(parser)


# --- running ------------------------------------------------------------------------------------------------------


def _target(args: argparse.Namespace, prefix: str = ""):
    """The layout that the options ask for. `pp` and `vpp` follow from the layer lists where they are not given."""
    from mm_models.layout import ParallelLayout
    from mm_models.weights.verbs import Target

    given = {name: getattr(args, prefix + name) for name in LAYOUT_NAMES}
    lists = given["llm_pp_layers"] or given["vit_pp_layers"]
    nested = bool(lists) and all(isinstance(row, list) for row in lists)
    vpp = given["vpp"] or (len(lists) if nested else 1)
    pp = given["pp"] or (len(lists[0]) if nested else len(lists) // vpp if lists else 1)
    degrees = {"tp": given["tp"] or 1, "pp": pp, "vpp": vpp, "ep": given["ep"] or 1, "etp": given["etp"]}
    return Target(
        layout=ParallelLayout(**degrees), vision_layers=given["vit_pp_layers"], text_layers=given["llm_pp_layers"]
    )


def _source(args: argparse.Namespace, prefix: str = ""):
    """The checkpoint to read: by its manifest, whose layout must be the one given, if one is; or a folder of the field."""
    from mm_models.config.model import load_model_config
    from mm_models.weights.foreign import is_foreign, open_foreign
    from mm_models.weights.manifest import open_checkpoint

    if is_foreign(args.mm, args.iteration):
        if args.model is None:
            raise UserError(
                f"{args.mm}: has no manifest (a folder of the field). Give --model model.json and the layout it was written in."
            )
        target = _target(args, prefix)
        return open_foreign(
            args.mm,
            load_model_config(args.model),
            target.layout,
            target.vision_layers,
            target.text_layers,
            args.iteration,
        )
    checkpoint = open_checkpoint(args.mm, args.iteration)
    _check_given_layout(args, prefix, checkpoint)
    return checkpoint


def _check_given_layout(args: argparse.Namespace, prefix: str, checkpoint) -> None:
    """Layout options of a checkpoint that has a manifest are a statement about it: refused when it is wrong."""
    given = {name: getattr(args, prefix + name) for name in LAYOUT_NAMES}
    if all(value is None for value in given.values()):
        return
    target, manifest = _target(args, prefix), checkpoint.manifest
    if given["llm_pp_layers"] or given["vit_pp_layers"]:
        given |= {"pp": target.layout.pp, "vpp": target.layout.vpp}
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


def _options(args: argparse.Namespace):
    from mm_models.cli.progress import progress_bar
    from mm_models.weights.verbs import Options

    return Options(jobs=args.jobs, overwrite=args.overwrite, progress=progress_bar if sys.stderr.isatty() else None)


def _hf_to_mm(args: argparse.Namespace) -> int:
    from mm_models.config.model import load_model_config
    from mm_models.weights import verbs

    if args.model and not (args.pp or args.llm_pp_layers or args.vit_pp_layers):
        model = load_model_config(args.model)
        args.llm_pp_layers = model.text and model.text.pipeline_num_layers
        args.vit_pp_layers = model.vision and model.vision.pipeline_num_layers
    report = verbs.hf_to_mm(
        args.hf, args.out, _target(args), model_json=args.model, converter=args.converter, options=_options(args)
    )
    print(report.line())
    return 0


def _mm_to_hf(args: argparse.Namespace) -> int:
    from mm_models.weights import verbs

    report = verbs.mm_to_hf(
        _source(args),
        args.hf,
        args.out,
        like_reference=args.like_reference,
        drop_extra=args.drop_extra,
        converter=args.converter,
        options=_options(args),
    )
    print(report.line())
    return 0


def _resplit(args: argparse.Namespace) -> int:
    from mm_models.weights import verbs

    print(
        verbs.resplit(
            _source(args, "source_"), args.out, _target(args), converter=args.converter, options=_options(args)
        ).line()
    )
    return 0


def _check(args: argparse.Namespace) -> int:
    from mm_models.weights.check import compare

    result = compare(Path(args.a), Path(args.b), jobs=args.jobs)
    for line in result.lines:
        print(line)
    return 0 if result.equal else 1


def _inspect(args: argparse.Namespace) -> int:
    from mm_models.weights.describe import describe

    print("\n".join(describe(Path(args.folder))))
    return 0


def _patterns(args: argparse.Namespace) -> int:
    from mm_models.registry import table

    weight_table = table("weight_maps").get(args.model_id)
    print(
        f"{args.model_id}: {weight_table.section}; Megatron tensor, how it is split, its shape, and the Hugging Face tensors it is made of"
    )
    for mm, hf, shape, shard in weight_table.patterns():
        print(f"{mm}\n    {shard:12} {shape}\n    <- {hf}")
    return 0


VERBS = {
    "hf_to_mm": Verb(help="a Hugging Face folder to a checkpoint", add=_hf_to_mm_options, run=_hf_to_mm),
    "mm_to_hf": Verb(help="a checkpoint to a complete Hugging Face folder", add=_mm_to_hf_options, run=_mm_to_hf),
    "resplit": Verb(
        help="a checkpoint to another layout, with its optimizer state", add=_resplit_options, run=_resplit
    ),
    "check": Verb(
        help="compare two folders of any kind, tensor by tensor, bitwise, and verify their CRCs",
        add=_check_options,
        run=_check,
    ),
    "inspect": Verb(help="what a folder is, from names and headers", add=_inspect_options, run=_inspect),
    "patterns": Verb(help="print the weight map of a model_id", add=_patterns_options, run=_patterns),
}


def _overview() -> str:
    rows = "\n".join(f"  {name:10} {verb.help}" for name, verb in VERBS.items())
    return f"{__doc__}\nVerbs ({PROG} VERB --help for the options):\n{rows}\n"


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    first, rest, converter = arguments[0], list(arguments[1:]), None
    if first not in VERBS:
        converter, first, rest = _converter(first, rest)
    verb = VERBS[first]
    parser = StrictParser(prog=f"{PROG} {first}", description=verb.help)
    verb.add(parser)
    args = parser.parse_strict(rest)
    _load_plugins(args.plugin)
    args.converter = converter
    if converter is not None:
        _known_converter(converter)
    return verb.run(args)


def _converter(first: str, rest: list[str]) -> tuple[str, str, list[str]]:
    """(converter, verb, options) of the long form; the converter's name is checked when plugins are loaded."""
    if rest and rest[0] in VERBS:
        return first, rest[0], rest[1:]
    if first.endswith("Converter"):
        got = rest[0] if rest else "nothing"
        close = nearest(got, VERBS)
        raise UserError(
            f"{first} {got}: expected one of {', '.join(VERBS)}" + (f"; did you mean {close!r}?" if close else ".")
        )
    close = nearest(first, VERBS)
    raise UserError(
        f"unknown verb {first!r}" + (f"; did you mean {close!r}?" if close else "") + f" Known: {', '.join(VERBS)}."
    )


def _load_plugins(plugins: Sequence[str]) -> None:
    if plugins:
        from mm_models.registry import load_plugins

        load_plugins(plugins)


def _known_converter(name: str) -> Any:
    from mm_models.registry import table

    return table("converters").get(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    return finish(PROG, lambda: _run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
