"""The command line of `pretrain_fsdp2.py`: one YAML, dotted overrides, three options. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mm_models.errors import UserError, unknown_name

OPTIONS = ("--help", "--check", "--platform", "--world")
PLATFORMS = ("cpu", "cuda", "npu")
DESCRIPTION = """\
Train a vision-language model with FSDP2. Start with torchrun; one process needs none.

  torchrun --standalone --nproc-per-node 2 pretrain_fsdp2.py config.yaml training.lr=1e-4
  python pretrain_fsdp2.py config.yaml --check --platform npu --world 128
"""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """`platform` and `world` are None where the command line leaves them to the process."""

    config: str
    overrides: tuple[str, ...] = ()
    check: bool = False
    platform: str | None = None
    world: int | None = None


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}.")


def parse(argv: Sequence[str]) -> Arguments:
    """`argv` (without the program's name). `--help` prints and exits 0; anything wrong is a `UserError`."""
    _refuse_unknown_and_repeated(argv)
    values = _parser().parse_intermixed_args(list(argv))
    config, *overrides = values.words
    if "=" in config and not config.endswith((".yaml", ".yml")):
        raise UserError(f"command line: the configuration comes first, got {config!r}. Example: config.yaml {config}")
    if stray := [word for word in overrides if "=" not in word]:
        raise UserError(f"command line: got {stray[0]!r}, expected section.key=value such as training.lr=1e-4.")
    if not values.check and (given := [name for name in ("platform", "world") if getattr(values, name) is not None]):
        raise UserError(
            f"command line: --{given[0]} says what --check judges the file for; a run takes what is there. Add --check or drop it."
        )
    return Arguments(
        config=config, overrides=tuple(overrides), check=values.check, platform=values.platform, world=values.world
    )


def _refuse_unknown_and_repeated(argv: Sequence[str]) -> None:
    seen: set[str] = set()
    for word in argv:
        name = word.split("=", 1)[0]
        if not re.match(r"--?[A-Za-z]", name):
            continue
        if "." in name:
            raise UserError(f"command line: got {word!r}; a key of the YAML has no dashes: {word.lstrip('-')}")
        if name not in {*OPTIONS, "-h"}:
            raise unknown_name("option", name, OPTIONS, where="the command line")
        if name in seen:
            raise UserError(f"command line: {name} is given twice; keep one.")
        seen.add(name)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_fsdp2.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pretrain_fsdp2.py config.yaml [section.key=value ...] [--check] [--platform P] [--world N]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="config.yaml [section.key=value ...]",
        help="the configuration, and keys of it to set; a value is YAML: training.lr=1e-4, training.load=null",
    )
    parser.add_argument("--check", action="store_true", help="validate file, model and layout, print them, then stop")
    parser.add_argument(
        "--platform",
        choices=PLATFORMS,
        help="with --check: the platform the file is for (default: the one present)",
    )
    parser.add_argument(
        "--world",
        type=_processes,
        metavar="N",
        help="with --check: number of processes (default: the launcher's, or 1)",
    )
    return parser


def _processes(word: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", word):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of processes, at least 1")
    return int(word)
