"""Rows of a JSON or JSONL file as conversations.

A row holds `messages` (a list of {role, content}) and `images` (a list of paths), under the names `attr` gives. In a
content, `<image>` stands for the next image of the row; their number must agree. Rows are counted from 0, and that
number is the sample id everywhere.

Refused by row: a missing or mistyped column, an unknown role, turns that do not alternate user / assistant after an
optional system text, a conversation without a last answer, image marks that do not match the images, and video.
Columns that `attr` does not name are left alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mm_models.config.data import Attributes
from mm_models.errors import UserError, nearest

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
LISTED = 10
"""How many faults of a file are written out with their reason before the rest is named by row alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """`role` is system, user or assistant, whatever the file calls it."""

    role: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    row: int
    turns: tuple[Turn, ...]
    images: tuple[str, ...]


def find_file(dataset: str, dataset_dir: str) -> Path:
    """`dataset` relative to the working directory, else to `dataset_dir`."""
    choices = (Path(dataset), Path(dataset_dir, dataset))
    for path in choices:
        if path.is_file():
            return path
    raise UserError(
        f"dataset {dataset!r}: no such file; looked at {' and '.join(str(path.absolute()) for path in choices)}."
    )


def read_rows(path: Path) -> list[Any]:
    """The rows of a file: a JSON array, or one JSON value per line when the name ends in `.jsonl`."""
    try:
        if path.suffix == ".jsonl":
            return list(_lines(path))
        rows = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}).") from error
    except json.JSONDecodeError as error:
        hint = " One value per line is JSONL: name the file .jsonl." if error.msg == "Extra data" else ""
        raise UserError(
            f"{path}: not valid JSON, line {error.lineno} column {error.colno}: {error.msg}.{hint}"
        ) from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: got {type(rows).__name__} at the top, expected a list of rows.")
    return rows


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{path}: line {number} is not valid JSON: {error.msg}.") from error


def parse_row(row: int, value: Any, attr: Attributes) -> Conversation:
    """One row as a conversation. Raises UserError with the reason alone; the caller adds file and row."""
    if not isinstance(value, dict):
        raise UserError(f"got {type(value).__name__}, expected an object")
    if attr.videos is not None and value.get(attr.videos):
        raise UserError(
            f"{len(value[attr.videos])} videos under {attr.videos!r}; video is not supported yet, take the row out"
        )
    turns = tuple(_system(value, attr) + _turns(value, attr))
    images = _images(value, attr)
    _check_order(turns)
    marks = sum(turn.text.count(IMAGE_MARK) for turn in turns)
    if marks != len(images):
        raise UserError(f"{marks} {IMAGE_MARK} marks in the text, {len(images)} images; each image needs its mark")
    return Conversation(row=row, turns=turns, images=images)


def _system(value: dict[str, Any], attr: Attributes) -> list[Turn]:
    text = value.get(attr.system) if attr.system is not None else None
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise UserError(f"{attr.system!r} is {type(text).__name__}, expected text")
    return [Turn(role="system", text=text)]


def _turns(value: dict[str, Any], attr: Attributes) -> list[Turn]:
    if attr.messages not in value:
        close = nearest(attr.messages, value)
        hint = f", did you mean {close!r}" if close else ""
        raise UserError(
            f"no key {attr.messages!r} (attr.messages){hint}; the row has {', '.join(map(repr, value)) or 'no keys'}"
        )
    messages = value[attr.messages]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{attr.messages!r} is {messages!r:.60}, expected a list of messages")
    tags = {attr.user_tag: "user", attr.assistant_tag: "assistant", attr.system_tag: "system"}
    roles = {tag: role for tag, role in tags.items() if tag is not None}
    turns = []
    for index, message in enumerate(messages):
        place = f"{attr.messages}[{index}]"
        if not isinstance(message, dict):
            raise UserError(f"{place} is {type(message).__name__}, expected an object")
        missing = [key for key in (attr.role_tag, attr.content_tag) if key not in message]
        if missing:
            raise UserError(f"{place} has no key {missing[0]!r}; it has {', '.join(map(repr, message)) or 'no keys'}")
        role, text = message[attr.role_tag], message[attr.content_tag]
        if not isinstance(role, str) or role not in roles:
            raise UserError(f"{place}: role {role!r}, expected one of {', '.join(map(repr, roles))}")
        if not isinstance(text, str):
            raise UserError(f"{place}: content is {type(text).__name__}, expected text with {IMAGE_MARK} marks")
        if not _is_unicode(text):
            raise UserError(f"{place}: half of a surrogate pair in the text; it is no Unicode text, mend the file")
        if VIDEO_MARK in text:
            raise UserError(f"{place}: a {VIDEO_MARK} mark; video is not supported yet, take the row out")
        turns.append(Turn(role=roles[role], text=text))
    return turns


def _is_unicode(text: str) -> bool:
    """JSON can write half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _images(value: dict[str, Any], attr: Attributes) -> tuple[str, ...]:
    images = value.get(attr.images) if attr.images is not None else None
    if images is None:
        return ()
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise UserError(f"{attr.images!r} is {images!r:.60}, expected a list of paths")
    return tuple(images)


def _check_order(turns: tuple[Turn, ...]) -> None:
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * (len(spoken) // 2)
    if not spoken or spoken != expected:
        raise UserError(
            f"turns are {', '.join(roles)}; expected an optional system, "
            "then user and assistant in turn, the answer last"
        )


def refuse(path: Path, total: int, faults: list[tuple[int, str]]) -> None:
    """Raise one error that names every faulty row of a file, the first with their reasons; nothing without faults."""
    if not faults:
        return
    lines = [f"  row {row}: {reason}" for row, reason in faults[:LISTED]]
    rest = [row for row, _ in faults[LISTED:]]
    more = [f"  and rows {ranges(rest)}"] if rest else []
    raise UserError(
        "\n".join([f"{path}: {len(faults)} of {total} rows refused (rows are counted from 0)", *lines, *more])
    )


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, all of them and short: 0-3, 7, 9-12."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
