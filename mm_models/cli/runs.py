"""Token ids as text a person can read: runs of trained and untrained tokens, with long repeats (image tokens) folded.

A run ends where the trained flag changes or a repeat begins; its text is what the tokenizer decodes it to, special
tokens included. Nothing heavy is imported before a tokenizer is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.errors import UserError

FOLD = 4
"""An id that stands more often than this in a row is written once, with its count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """`text` of `count` tokens from token `start` on; `repeat`: one id, `count` times."""

    start: int
    count: int
    text: str
    trained: bool
    repeat: bool = False
    image: bool = False

    def line(self) -> str:
        """For plain text: line breaks as `\\n`, a repeat with its count."""
        text = self.text.replace("\\", "\\\\").replace("\n", "\\n")
        return f"{text} x {self.count}" if self.repeat else text


def open_tokenizer(folder: str | Path) -> Any:
    """The fast tokenizer of a model's folder, without the rest of the folder."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; token ids cannot be written as text without it.")
    return Tokenizer.from_file(str(path))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def runs(
    tokenizer: Any, ids: Sequence[int], trained: Sequence[bool], *, image: tuple[int, Sequence[int]] | None = None
) -> list[Run]:
    """The whole of `ids`, in order. `image` is the image token and how often each image repeats it: one run each."""
    token, counts = image or (None, ())
    sizes = iter(counts)
    found: list[Run] = []
    open_at = at = 0

    def close(end: int) -> None:
        if end > open_at:
            text = decode(tokenizer, ids[open_at:end])
            found.append(Run(start=open_at, count=end - open_at, text=text, trained=trained[open_at]))

    while at < len(ids):
        count = next(sizes) if ids[at] == token else _repeated(ids, trained, at)
        if ids[at] == token or count > FOLD:
            close(at)
            text = decode(tokenizer, ids[at : at + 1])
            kind = {"repeat": True, "image": ids[at] == token}
            found.append(Run(start=at, count=count, text=text, trained=trained[at], **kind))
            open_at = at + count
        elif trained[at] != trained[open_at]:
            close(at)
            open_at = at
        at += count
    close(at)
    return found


def _repeated(ids: Sequence[int], trained: Sequence[bool], at: int) -> int:
    """How often the token at `at` follows itself."""
    end = at + 1
    while end < len(ids) and ids[end] == ids[at] and trained[end] == trained[at]:
        end += 1
    return end - at
