"""The one error a user's mistake ends in, and the nearest-name hint that goes with it.

`UserError` is what every command line prints without a traceback (exit status 2). Its text says what is wrong, where,
what was found, what was expected and what to do. Broken invariants of our own stay `AssertionError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave us: a file, a flag, a key, a layout."""


def nearest(got: str, known: Iterable[str]) -> str | None:
    """The known name closest to `got`, or None. Case and `-`/`_` count as no difference."""
    known = sorted(known)
    folded = {name.lower().replace("-", "_"): name for name in reversed(known)}
    hits = difflib.get_close_matches(got.lower().replace("-", "_"), folded, n=1, cutoff=0.5)
    return folded[hits[0]] if hits else None


def unknown_name(
    kind: str, got: str, known: Iterable[str], *, where: str | None = None, hint: str | None = None
) -> UserError:
    """An error for a name that does not exist: the kind of name, the place, the nearest and all known names."""
    known = sorted(known)
    close = nearest(got, known)
    text = f"unknown {kind} {got!r}" + (f" in {where}" if where else "")
    if close is not None:
        text += f"; did you mean {close!r}?"
    text += f" Known: {', '.join(known) if known else 'none'}."
    return UserError(text + (f" {hint}" if hint else ""))
