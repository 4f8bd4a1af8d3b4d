"""A strict argument parser and the way a command ends, for every command line of this package.

Refused, by name: unknown options (with the nearest one), abbreviations, an option given twice in any of its spellings. A
user's mistake is one line on stderr and exit status 2, without a traceback.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mm_models.errors import UserError, nearest


class StrictParser(argparse.ArgumentParser):
    """argparse without its silences."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse_strict(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, refusing what argparse lets pass."""
        actions = {name: action for action in self._actions for name in action.option_strings}
        seen: dict[str, str] = {}
        for token in arguments:
            name = token.partition("=")[0]
            if not name.startswith("--") or name == "--":
                continue
            if name not in actions:
                close = nearest(name, actions)
                raise UserError(
                    f"unknown option {name!r}"
                    + (f"; did you mean {close!r}?" if close else "")
                    + f" See {self.prog} --help."
                )
            action = actions[name]
            if action.dest in seen and not isinstance(action, argparse._AppendAction):
                other = f" (as {seen[action.dest]})" if seen[action.dest] != name else ""
                raise UserError(f"option {name!r} is given twice{other}; keep one.")
            seen[action.dest] = name
        return self.parse_args(arguments)


def layer_lists(text: str) -> list:
    """`[12,16]` or `[[12,16],[1,2]]`: layers per pipeline stage, or one such list per virtual chunk."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a list such as '[12,16]' or '[[12,16]]' (quote it: some shells expand brackets)"
        )
    return value


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 0")
    return int(text)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """A place that cannot be written, as an error that names it; `option` is the flag with its value."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: cannot be written ({error.strerror}).") from error


def finish(prog: str, run: Callable[[], int]) -> int:
    """Run a command; the exit status. A character that the terminal's encoding lacks is written as `\\u4e2d`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return run()
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
