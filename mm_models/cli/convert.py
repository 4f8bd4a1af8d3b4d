"""`mm-convert`: weights between Hugging Face folders and checkpoints of either target, in any layout.

    mm-convert hf_to_mm --hf HF --out DIR [--tp 2 --pp 2 --ep 2 ...]
    mm-convert mm_to_hf --mm DIR --hf REFERENCE --out NEW_HF
    mm-convert resplit  --mm DIR --out NEW_DIR [--tp 1 --pp 4 ...]
    mm-convert hf_to_dcp --hf HF --out DIR [--expert-layout stacked_hf]
    mm-convert dcp_to_hf --dcp DIR --hf REFERENCE --out NEW_HF
    mm-convert mm_to_dcp --mm DIR --out NEW_DIR | dcp_to_mm --dcp DIR --out NEW_DIR [--tp 2 ...]
    mm-convert moe_expert --style merge|split --hf_dir HF --save_dir NEW_HF
    mm-convert check A B | inspect DIR | patterns MODEL_ID

Every option has the field's spelling too, usable after the converter's name:

    mm-convert Glm4vMoeConverter hf_to_mm --cfg.mm_dir DIR --cfg.hf_config.hf_dir HF --cfg.parallel_config.tp_size 2 \
        --cfg.parallel_config.llm_pp_layers '[[2,2]]' --cfg.parallel_config.vit_pp_layers '[[2,0]]'
    mm-convert ExpertMergeDcpConverter hf_to_dcp --hf_dir HF --save_dir DIR --dcp_prefix ""

Without a converter's name the family is found from the folder. Neither torch nor transformers is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.cli import convert_dcp, convert_field
from mm_models.cli.convert_options import (
    Verb,
    bounds_options,
    layout_options,
    options,
    run_options,
    source,
    target,
    write_options,
)
from mm_models.cli.parser import StrictParser, finish
from mm_models.errors import UserError, nearest

PROG = "mm-convert"
# --- options ------------------------------------------------------------------------------------------------------


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
    layout_options(parser, "parallel_config")
    convert_field.field_options(parser, "parallel_config")
    write_options(parser)


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
    bounds_options(parser)
    parser.add_argument(
        "--model", metavar="FILE", help="model.json, for a folder of the field without manifest (default: as --hf says)"
    )
    layout_options(
        parser, "parallel_config", what=" of the checkpoint (checked against its manifest; needed without one)"
    )
    convert_field.field_options(parser, "parallel_config")
    write_options(parser)


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
    layout_options(parser, "target_parallel_config", what=" to write")
    layout_options(
        parser,
        "source_parallel_config",
        prefix="source-",
        what=" of the source (checked against its manifest; needed without one)",
    )
    convert_field.field_options(parser, "source_parallel_config", "target_parallel_config")
    write_options(parser)


def _check_options(parser: StrictParser) -> None:
    parser.add_argument("a", metavar="A", help="a Hugging Face or checkpoint folder")
    parser.add_argument("b", metavar="B", help="another")
    run_options(parser)


def _inspect_options(parser: StrictParser) -> None:
    parser.add_argument("folder", metavar="DIR")
    run_options(parser)


def _patterns_options(parser: StrictParser) -> None:
    parser.add_argument("model_id", metavar="MODEL_ID", help="an id of the table weight_maps")
    run_options(parser)


# --- running ------------------------------------------------------------------------------------------------------


def _hf_to_mm(args: argparse.Namespace) -> int:
    from mm_models.config.model import load_model_config
    from mm_models.weights import verbs

    if args.model and not (args.pp or args.llm_pp_layers or args.vit_pp_layers):
        model = load_model_config(args.model)
        args.llm_pp_layers = model.text and model.text.pipeline_num_layers
        args.vit_pp_layers = model.vision and model.vision.pipeline_num_layers
    report = verbs.hf_to_mm(
        args.hf,
        args.out,
        target(args, "parallel_config"),
        model_json=args.model,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    return 0


def _mm_to_hf(args: argparse.Namespace) -> int:
    from mm_models.weights import verbs

    report = verbs.mm_to_hf(
        source(args, "parallel_config"),
        args.hf,
        args.out,
        like_reference=args.like_reference,
        drop_extra=args.drop_extra,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    return 0


def _resplit(args: argparse.Namespace) -> int:
    from mm_models.weights import verbs

    report = verbs.resplit(
        source(args, "source_parallel_config", "source_"),
        args.out,
        target(args, "target_parallel_config"),
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
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
    **convert_dcp.VERBS,
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
    args.long_form = converter == convert_dcp.LONG_FORM
    args.converter = None if args.long_form else converter
    if args.long_form and first not in convert_dcp.LONG_FORM_VERBS:
        raise UserError(f"{converter} {first}: expected {' or '.join(convert_dcp.LONG_FORM_VERBS)}.")
    if args.converter is not None:
        _known_converter(converter)
    return verb.run(args)


def _converter(first: str, rest: list[str]) -> tuple[str, str, list[str]]:
    """(converter, verb, options) of the long form; the converter's name is checked when plugins are loaded."""
    if rest and rest[0] in VERBS:
        return first, rest[0], rest[1:]
    if first.endswith("Converter"):
        got = rest[0] if rest else "nothing"
        convert_field.refuse_verb(first, got)
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
