"""The verbs of `mm-convert` for DCP checkpoints and merged experts, in the short form and in the field's.

The field's form, `mm-convert ExpertMergeDcpConverter hf_to_dcp`, takes the expert layout from GLM4V_DCP_3D where no flag says
it, and tells so in its last line; the short form writes what the FSDP2 target trains on.
"""

from __future__ import annotations

import argparse

from mm_models.cli.convert_options import Verb, bounds_options, layout_options, options, source, target, write_options
from mm_models.cli.parser import StrictParser
from mm_models.errors import UserError

LONG_FORM = "ExpertMergeDcpConverter"
LONG_FORM_VERBS = ("hf_to_dcp", "dcp_to_hf")
LAYOUTS = ("stacked_hf", "stacked", "flat", "per_expert")


# --- options ------------------------------------------------------------------------------------------------------


def _expert_layout(parser: StrictParser, text: str) -> None:
    parser.add_argument(
        "--expert-layout",
        dest="expert_layout",
        choices=LAYOUTS,
        default=None,
        help=f"stacked_hf (E, out, in), stacked (E, in, out), flat (E*in, out), per_expert; {text}",
    )


def _dcp_prefix(parser: StrictParser, text: str) -> None:
    parser.add_argument(
        "--dcp_prefix",
        dest="dcp_prefix",
        default=None,
        metavar="PREFIX",
        help=f"a key is 'model.' + PREFIX + Hugging Face name; {text} (MindSpeed's own default is 'model.')",
    )


def _hf_prefix(parser: StrictParser) -> None:
    parser.add_argument(
        "--hf_prefix",
        dest="hf_prefix",
        default="",
        metavar="PREFIX",
        help="stands before every name of the Hugging Face folder (default: nothing)",
    )


def _folder(parser: StrictParser, short: str, long: str, text: str, *, required: bool = True) -> None:
    parser.add_argument(f"--{short}", f"--{long}", dest=short, required=required, metavar="DIR", help=text)


def _dcp_source(parser: StrictParser) -> None:
    _folder(parser, "dcp", "dcp_dir", "DCP folder to read, or the folder above it")
    parser.add_argument("--iteration", metavar="N", help="which one (a number or 'release'; default: the tracker's)")
    _expert_layout(parser, "for a folder without manifest (default there: GLM4V_DCP_3D=1 is stacked, unset is flat)")
    _dcp_prefix(parser, "default: the manifest's, else empty")


def _hf_to_dcp_options(parser: StrictParser) -> None:
    _folder(parser, "hf", "hf_dir", "Hugging Face folder to read")
    _folder(parser, "out", "save_dir", "folder to write (release/, tracker, config, tokenizer and processor files)")
    _expert_layout(parser, "default stacked_hf, what the FSDP2 target trains on")
    _dcp_prefix(parser, "default: empty")
    _hf_prefix(parser)
    write_options(parser)


def _dcp_to_hf_options(parser: StrictParser) -> None:
    _dcp_source(parser)
    _folder(parser, "hf", "hf_dir", "reference folder: names, shards, tokenizer")
    _folder(parser, "out", "save_dir", "Hugging Face folder to write")
    parser.add_argument("--like-reference", action="store_true", help="cast to the reference's data types")
    parser.add_argument("--drop-extra", action="store_true", help="leave out tensors the architecture does not hold")
    bounds_options(parser)
    _hf_prefix(parser)
    write_options(parser)


def _mm_to_dcp_options(parser: StrictParser) -> None:
    _folder(parser, "mm", "mm_dir", "checkpoint folder to read")
    _folder(parser, "out", "save_dir", "folder to write (release/ and tracker)")
    _folder(
        parser,
        "hf",
        "hf_dir",
        "Hugging Face folder whose config, tokenizer and processor files go beside",
        required=False,
    )
    parser.add_argument(
        "--iteration", metavar="N", help="which checkpoint (a number or 'release'; default: the tracker's)"
    )
    parser.add_argument("--model", metavar="FILE", help="model.json, for a folder of the field that has no manifest")
    layout_options(
        parser, "parallel_config", what=" of the checkpoint (checked against its manifest; needed without one)"
    )
    bounds_options(parser)
    _expert_layout(parser, "default stacked_hf")
    _dcp_prefix(parser, "default: empty")
    write_options(parser)


def _dcp_to_mm_options(parser: StrictParser) -> None:
    _dcp_source(parser)
    _folder(parser, "out", "save_dir", "checkpoint folder to write (release/)")
    parser.add_argument("--model", metavar="FILE", help="model.json, for a folder without manifest and config.json")
    layout_options(parser, "parallel_config", what=" to write")
    write_options(parser)


def _moe_expert_options(parser: StrictParser) -> None:
    parser.add_argument(
        "--style", required=True, choices=("merge", "split"), help="stack the experts, or take them apart"
    )
    _folder(parser, "hf", "hf_dir", "Hugging Face folder to read")
    _folder(parser, "out", "save_dir", "Hugging Face folder to write")
    _expert_layout(parser, "of a merge (default: GLM4V_DCP_3D=1 is stacked, unset is flat)")
    _hf_prefix(parser)
    write_options(parser)


# --- running ------------------------------------------------------------------------------------------------------


def _hf_to_dcp(args: argparse.Namespace) -> int:
    from mm_models.weights import dcp_verbs

    report = dcp_verbs.hf_to_dcp(
        args.hf,
        args.out,
        expert_layout=args.expert_layout,
        by_variable=args.long_form,
        dcp_prefix=args.dcp_prefix or "",
        hf_prefix=args.hf_prefix,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    if args.long_form and args.expert_layout is None and report.expert_layout:
        print(_said(report.expert_layout))
    return 0


def _said(layout: str) -> str:
    if layout == "stacked":
        return "experts stacked (E, in, out), as GLM4V_DCP_3D=1 says; the FSDP2 target trains on it with model.expert_layout: stacked"
    return (
        "experts flat (E*in, out), as GLM4V_DCP_3D unset says: for the bridged path, not for the FSDP2 target. "
        "For that: mm-convert hf_to_dcp --hf ... --out ... (stacked_hf)"
    )


def _dcp_to_hf(args: argparse.Namespace) -> int:
    from mm_models.weights import dcp_verbs

    report = dcp_verbs.dcp_to_hf(
        args.dcp,
        args.hf,
        args.out,
        expert_layout=args.expert_layout,
        dcp_prefix=args.dcp_prefix,
        hf_prefix=args.hf_prefix,
        iteration=args.iteration,
        like_reference=args.like_reference,
        drop_extra=args.drop_extra,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    return 0


def _mm_to_dcp(args: argparse.Namespace) -> int:
    from mm_models.weights import dcp_verbs

    report = dcp_verbs.mm_to_dcp(
        source(args, "parallel_config"),
        args.out,
        hf=args.hf,
        expert_layout=args.expert_layout,
        dcp_prefix=args.dcp_prefix or "",
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    return 0


def _dcp_to_mm(args: argparse.Namespace) -> int:
    from mm_models.weights import dcp_verbs

    report = dcp_verbs.dcp_to_mm(
        args.dcp,
        args.out,
        target(args, "parallel_config"),
        model_json=args.model,
        expert_layout=args.expert_layout,
        dcp_prefix=args.dcp_prefix,
        iteration=args.iteration,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    return 0


def _moe_expert(args: argparse.Namespace) -> int:
    from mm_models.weights import experts
    from mm_models.weights.dcp import layouts

    if args.style == "split" and args.expert_layout not in (None, "per_expert"):
        raise UserError(f"--style split writes per_expert, not {args.expert_layout}.")
    layout = "per_expert" if args.style == "split" else layouts.declared(args.expert_layout)
    report = experts.moe_expert(
        args.hf,
        args.out,
        expert_layout=layout,
        hf_prefix=args.hf_prefix,
        converter=args.converter,
        options=options(args),
    )
    print(report.line())
    if args.style == "merge" and args.expert_layout is None:
        print(
            f"experts {layout}, as GLM4V_DCP_3D {'=1' if layout == 'stacked' else 'unset'} says (--expert-layout chooses)"
        )
    return 0


VERBS = {
    "hf_to_dcp": Verb(help="a Hugging Face folder to a DCP checkpoint", add=_hf_to_dcp_options, run=_hf_to_dcp),
    "dcp_to_hf": Verb(
        help="a DCP checkpoint to a complete Hugging Face folder", add=_dcp_to_hf_options, run=_dcp_to_hf
    ),
    "mm_to_dcp": Verb(
        help="a Megatron checkpoint's weights to a DCP checkpoint", add=_mm_to_dcp_options, run=_mm_to_dcp
    ),
    "dcp_to_mm": Verb(
        help="a DCP checkpoint's weights to a Megatron checkpoint", add=_dcp_to_mm_options, run=_dcp_to_mm
    ),
    "moe_expert": Verb(
        help="stack a Hugging Face folder's experts, or take them apart", add=_moe_expert_options, run=_moe_expert
    ),
}
