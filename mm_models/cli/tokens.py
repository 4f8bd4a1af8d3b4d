"""`mm-models tokens`: what the model is given, dumped, shown and compared bit by bit.

    mm-models tokens show DIR [--batch STEP]
    mm-models tokens compare A B [--batches N]
    mm-models tokens dump --mm-model model.json --mm-data data.json [--batches N ...] -o DIR
    mm-models tokens dump --config config.yaml [--world N] [--batches N] -o DIR [section.key=value ...]

A training run makes a dump with --dump-tokens (pretrain_vlm.py) or tools.token_dump (pretrain_fsdp2.py); `dump` makes one
of the same data without a model. `compare` ends with status 1 at a difference, and writes the first one as text.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mm_models.cli.parser import StrictParser, natural, positive
from mm_models.errors import UserError, unknown_name

if TYPE_CHECKING:
    from mm_models.train.token_dump import Difference, Dump, Row

PROG = "mm-models tokens"
AROUND = 12
"""Tokens of text shown before and after a difference."""


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        for verb, (describe, _) in VERBS.items():
            print(_parser(verb, describe).format_help())
        return 0 if arguments else 2
    if arguments[0] not in VERBS:
        raise unknown_name("command", arguments[0], VERBS, where=PROG)
    describe, run = VERBS[arguments[0]]
    return run(_parser(arguments[0], describe).parse_strict(arguments[1:]))


def _parser(verb: str, describe: Callable[[StrictParser], None]) -> StrictParser:
    parser = StrictParser(prog=f"{PROG} {verb}")
    describe(parser)
    return parser


def _describe_show(parser: StrictParser) -> None:
    parser.description = "Print what a dump holds; with --batch the text of one step, trained tokens in brackets."
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--batch", type=positive, metavar="STEP", help="one step, sample by sample")


def _show(args: argparse.Namespace) -> int:
    from mm_models.train.token_dump import Dump

    dump = Dump(args.folder)
    if args.batch is None:
        print(f"{dump.folder}: {len(dump.steps)} steps of {dump.dp_size} data-parallel ranks, {dump.stages} stages")
        for step in dump.steps:
            batch = dump.batch(step)
            tokens = sum(len(row.ids()) for row in batch.rows)
            trained = sum(int(row.parts["loss_mask"].sum()) for row in batch.rows if "loss_mask" in row.parts)
            ids = ", ".join(str(row.sample_id) for row in batch.rows)
            print(f"step {step}: {tokens} tokens, {trained} trained, {len(batch.images)} images; samples {ids}")
        return 0
    if args.batch not in dump.steps:
        raise UserError(f"{dump.folder}: no step {args.batch}; it has {', '.join(map(str, dump.steps))}.")
    batch = dump.batch(args.batch)
    for row in batch.rows:
        print(f"sample {row.sample_id}: {len(row.ids())} tokens, padded to {row.length}")
        print(_text(dump, row))
    for place, (grid, pixels) in enumerate(batch.images):
        print(f"image {place}: grid {' x '.join(map(str, grid))}, pixels {pixels or 'not given to any stage'}")
    return 0


def _text(dump: Dump, row: Row) -> str:
    from mm_models.cli.runs import open_tokenizer, runs

    found = runs(open_tokenizer(dump.tokenizer), row.ids(), row.trained())
    return "".join(f"[[{run.line()}]]" if run.trained else run.line() for run in found)


def _describe_compare(parser: StrictParser) -> None:
    parser.description = "Compare two dumps bit by bit, step by step; the numbers of ranks and stages may differ."
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--batches", type=positive, metavar="N", help="only the first steps (default: all of both)")


def _compare(args: argparse.Namespace) -> int:
    from mm_models.train.token_dump import Dump, difference

    a, b = Dump(args.a), Dump(args.b)
    found = difference(a, b, batches=args.batches)
    if found is None:
        steps = a.steps[: args.batches]
        print(
            f"identical: {len(steps)} steps ({steps[0]} to {steps[-1]}), every token, label, mask, position and pixel"
        )
        return 0
    print(f"DIFFERENT, first at step {found.step}, {found.part}: {found.what}")
    for name, dump, row in (("A", a, found.a), ("B", b, found.b)):
        if row is not None:
            print(f"  {name} ({dump.folder}), sample {row.sample_id}:")
            print(f"    {_neighbourhood(dump, row, found)}")
    return 1


def _neighbourhood(dump: Dump, row: Row, found: Difference) -> str:
    """The text around the first difference, its token between arrows."""
    from mm_models.cli.runs import decode, open_tokenizer, runs

    if "input_ids" not in row.parts:
        return "no input_ids in this dump"
    try:
        tokenizer = open_tokenizer(dump.tokenizer)
    except UserError as error:
        return f"({error})"
    ids, flags = row.parts["input_ids"].tolist(), [False] * len(row.parts["input_ids"])
    at = found.at or 0
    before, here, after = max(0, at - AROUND), min(at, len(ids)), min(at + 1, len(ids))
    parts = ((before, here), (after, min(len(ids), after + AROUND)))
    left, right = ("".join(run.line() for run in runs(tokenizer, ids[a:b], flags[a:b])) for a, b in parts)
    token = decode(tokenizer, ids[here:after]).replace("\n", "\\n")
    middle = f">>>{token}<<<" if found.at is not None else token
    return f"{'...' if before else ''}{left}{middle}{right}{'...' if parts[1][1] < len(ids) else ''}"


def _describe_dump(parser: StrictParser) -> None:
    parser.description = "Write the first batches that a run would train on, without a model."
    parser.add_argument("--mm-model", metavar="FILE", help="model.json of pretrain_vlm.py")
    parser.add_argument("--mm-data", metavar="FILE", help="data.json of pretrain_vlm.py")
    parser.add_argument("--config", metavar="FILE", help="YAML of pretrain_fsdp2.py, in place of the two")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --config: put into the YAML")
    parser.add_argument("--world", type=positive, metavar="N", help="with --config: processes of the run (default: 1)")
    parser.add_argument("--batches", type=positive, default=8, metavar="N", help="steps (default: 8)")
    for name, kind, text in (
        ("micro-batch-size", positive, "samples per forward pass (default: 1)"),
        ("global-batch-size", positive, "samples per step (default: micro-batch size)"),
        ("seed", natural, "seed of the order (default: 1234)"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"with --mm-data: {text}")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder to write")


def _dump(args: argparse.Namespace) -> int:
    model, data, micro, batch, seed = _from_yaml(args) if args.config else _from_json(args)
    from mm_models.data.loader import build_loader
    from mm_models.train import tokens

    tokens.check_folder(args.out)
    loader = build_loader(data, model_config=model, micro_batch_size=micro, global_batch_size=batch, seed=seed)
    print(*loader.lines(), sep="\n")
    folder = data.dataset_param.preprocess_parameters.model_name_or_path
    dump = tokens.TokenDump(args.out, tokens.Place(), tokenizer=folder)
    per_step = batch // micro
    for index, found in enumerate(itertools.islice(loader, args.batches * per_step)):
        dump.add(1 + index // per_step, found)
    dump.write()
    print(f"{args.out}: {args.batches} steps of {batch} samples")
    return 0


Source = tuple[Any, Any, int, int, int]
"""Model, data, micro-batch size, global batch size, seed."""


def _from_json(args: argparse.Namespace) -> Source:
    if not args.mm_model or not args.mm_data:
        raise UserError("give --mm-model and --mm-data, or --config.")
    if args.overrides or args.world:
        raise UserError(f"{'--world' if args.world else args.overrides[0]} belongs to --config; drop it.")
    from mm_models.config.data import load_data_config
    from mm_models.config.model import load_model_config

    micro = args.micro_batch_size or 1
    model, data = load_model_config(args.mm_model), load_data_config(args.mm_data)
    return model, data, micro, args.global_batch_size or micro, 1234 if args.seed is None else args.seed


def _from_yaml(args: argparse.Namespace) -> Source:
    names = ("mm_model", "mm_data", "micro_batch_size", "global_batch_size", "seed")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)}: the YAML says that; override it as section.key=value, or drop --config.")
    from mm_models.config.fsdp2 import load_config, plugins
    from mm_models.fsdp2.sources import read_model

    config = load_config(args.config, args.overrides)
    plugins.load(config.training.plugin)
    _, model, _ = read_model(config)
    training = config.training
    batch = training.micro_batch_size * training.gradient_accumulation_steps * (args.world or 1)
    return model, config.data, training.micro_batch_size, batch, training.seed


VERBS = {"show": (_describe_show, _show), "compare": (_describe_compare, _compare), "dump": (_describe_dump, _dump)}
