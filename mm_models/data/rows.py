"""Rows of a data file as conversations.

A row holds messages and images, under the names `attr` gives: `messages` with {role, content}, `conversations` with
{from, value}, `image` with one path. A content is text, or a list of parts as OpenAI and Hugging Face write them:
{type: text, text}, {type: image_url, image_url: {url}}, {type: image, image}. In text, `<image>` stands for the next
image of the row, wherever it stands; so does an image part that names none. Text is kept as it is, the line break
around an `<image>` too: that is what Hugging Face's template gets. Rows are counted from 0, and that number is the
sample id everywhere.

Refused by row: a missing or mistyped column, an unknown role, turns that do not alternate user / assistant after an
optional system text, a conversation without a last answer, what would be lost unseen (tool calls, weights), video, and
marks that do not match the images. An image without a mark is one of those: a chat template writes no image where the
content has none. Columns that `attr` does not name are left alone; one of `SPOKEN` that holds something is noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mm_models.config.data import Attributes
from mm_models.data import images
from mm_models.data.images import ImageBytes
from mm_models.errors import UserError, nearest

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
TEXT, IMAGES, VIDEOS = "text", ("image", "image_url"), ("video", "video_url")
"""Types of a content part."""
UNSEEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""With `UNSEEN`: keys of a message whose content would be lost."""
SWITCHES = ("weight", "loss", "train", "training", "loss_weight", "loss_mask")
"""Keys by which other trainers weigh a message, or leave it out; 1 and true ask for nothing."""
SPOKEN = ("system", "system_prompt", "tools", *MEDIA)
"""Columns that people expect to be read."""
SOURCES = ("image", "image_url", "path", "url")
"""Keys of an image part that say where the image is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """`role` is system, user or assistant, whatever the file calls it."""

    role: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    row: int
    turns: tuple[Turn, ...]
    images: tuple[str | ImageBytes, ...]
    """In the order of their marks."""
    notes: tuple[str, ...] = ()
    """What the reader of the report should know."""


def parse_row(row: int, value: Any, attr: Attributes) -> Conversation:
    """One row as a conversation. Raises UserError with the reason alone; the caller adds file and row."""
    if not isinstance(value, dict):
        raise UserError(f"got {type(value).__name__}, expected an object")
    if attr.videos is not None and value.get(attr.videos):
        found = value[attr.videos]
        count = len(found) if isinstance(found, list) else 1
        raise UserError(f"{count} videos under {attr.videos!r}; video is not supported yet, take the row out")
    turns = _system(value, attr)
    slots: list[str | ImageBytes | None] = [None for turn in turns for _ in range(turn.text.count(IMAGE_MARK))]
    for index, message in enumerate(_messages(value, attr)):
        turn, found = _turn(f"{attr.messages}[{index}]", message, attr)
        turns.append(turn)
        slots += found
    column = _column(value, attr)
    _check_order(turns)
    marks = slots.count(None)
    if marks != len(column):
        raise UserError(
            f"{marks} {IMAGE_MARK} marks in the text, {len(column)} images; each image needs its mark{_absent(value, attr)}"
        )
    supply = iter(column)
    found = tuple(next(supply) if slot is None else slot for slot in slots)
    for image in found:
        if not _is_unicode(image if isinstance(image, str) else image.name):
            raise UserError(f"image {str(image)!r}: half of a surrogate pair in the name; rename the file")
    return Conversation(row=row, turns=tuple(turns), images=found, notes=_unread(value, attr))


def _system(value: dict[str, Any], attr: Attributes) -> list[Turn]:
    text = value.get(attr.system) if attr.system is not None else None
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise UserError(f"{attr.system!r} is {type(text).__name__}, expected text")
    _check_text(repr(attr.system), text)
    return [Turn(role="system", text=text)]


def _messages(value: dict[str, Any], attr: Attributes) -> list[Any]:
    if attr.messages not in value:
        close = nearest(attr.messages, _unnamed(value, attr))
        hint = f", did you mean {close!r}" if close else ""
        raise UserError(
            f"no key {attr.messages!r} (attr.messages){hint}; the row has {', '.join(map(repr, value)) or 'no keys'}"
        )
    messages = value[attr.messages]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{attr.messages!r} is {messages!r:.60}, expected a list of messages")
    return messages


def _turn(place: str, message: Any, attr: Attributes) -> tuple[Turn, list[str | ImageBytes | None]]:
    """A message, and for each mark in its text the image that belongs there; None takes the next of the row's."""
    if not isinstance(message, dict):
        raise UserError(f"{place} is {type(message).__name__}, expected an object")
    missing = [key for key in (attr.role_tag, attr.content_tag) if key not in message]
    if missing:
        raise UserError(f"{place} has no key {missing[0]!r}; it has {', '.join(map(repr, message)) or 'no keys'}")
    lost = [key for key in (*UNSEEN, *MEDIA) if message.get(key) and _given(message[key])]
    lost += [key for key in SWITCHES if message.get(key) is not None and message[key] != 1]
    if lost:
        raise UserError(f"{place}: {lost[0]!r} is {message[lost[0]]!r:.60}, which has no effect here; take it out")
    tags = {attr.user_tag: "user", attr.assistant_tag: "assistant", attr.system_tag: "system"}
    roles = {tag: role for tag, role in tags.items() if tag is not None}
    role, content = message[attr.role_tag], message[attr.content_tag]
    if not isinstance(role, str) or role not in roles:
        known = ", ".join(f"{tag!r} (attr.{role}_tag)" for tag, role in roles.items())
        raise UserError(f"{place}: role {role!r}, expected one of {known}")
    if isinstance(content, str):
        content = [{"type": TEXT, TEXT: content}]
    elif not isinstance(content, list):
        raise UserError(f"{place}: content is {type(content).__name__}, expected text or a list of parts")
    texts, slots = [], []
    for part in content:
        text, found = _part(place, part)
        texts.append(text)
        slots += found
    return Turn(role=roles[role], text="".join(texts)), slots


def _part(place: str, part: Any) -> tuple[str, list[str | ImageBytes | None]]:
    """A content part as text with marks, and the images of the marks."""
    if not isinstance(part, dict):
        raise UserError(f"{place}: a part of the content is {type(part).__name__}, expected an object with a type")
    kind = part.get("type")
    if kind in VIDEOS:
        raise UserError(f"{place}: a part of type {kind!r}; video is not supported yet, take the row out")
    if kind in IMAGES:
        sources = [part[key] for key in SOURCES if _given(part.get(key))]
        if len(sources) > 1:
            raise UserError(f"{place}: an image part with {len(sources)} sources, expected one")
        _check_alone(place, part, (TEXT, *VIDEOS))
        source = sources[0] if sources else None
        if isinstance(source, dict) and "url" in source:
            source = source["url"]
        return IMAGE_MARK, [None if source is None else images.parse(source)]
    if kind != TEXT:
        known = ", ".join(map(repr, (TEXT, *IMAGES)))
        raise UserError(f"{place}: a part of type {kind!r}, expected one of {known}")
    text = part.get(TEXT)
    if not isinstance(text, str):
        raise UserError(f"{place}: text is {type(text).__name__}, expected text with {IMAGE_MARK} marks")
    _check_text(place, text)
    _check_alone(place, part, (*SOURCES, *VIDEOS))
    return text, [None] * text.count(IMAGE_MARK)


def _check_alone(place: str, part: dict[str, Any], others: Iterable[str]) -> None:
    """What a part has for another type would be lost; a Parquet file has those keys in every part, as null."""
    lost = [key for key in others if part.get(key) and _given(part[key])]
    if lost:
        raise UserError(f"{place}: a part of type {part['type']!r} with {lost[0]!r}; make it a part of its own")


def _check_text(place: str, text: str) -> None:
    if not _is_unicode(text):
        raise UserError(f"{place}: half of a surrogate pair in the text; it is no Unicode text, mend the file")
    if VIDEO_MARK in text:
        raise UserError(f"{place}: a {VIDEO_MARK} mark; video is not supported yet, take the row out")


def _is_unicode(text: str) -> bool:
    """JSON can write half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _column(value: dict[str, Any], attr: Attributes) -> list[str | ImageBytes]:
    """The images of the row's own column: a list, or one alone."""
    found = value.get(attr.images) if attr.images is not None else None
    if found == "" or not _given(found):
        return []
    return [images.parse(image) for image in (found if isinstance(found, list) else [found])]


def _given(value: Any) -> bool:
    """Not null, and no object of nulls: Parquet files have those for an object that is not there."""
    return any(map(_given, value.values())) if isinstance(value, dict) else value is not None


def _unnamed(value: dict[str, Any], attr: Attributes) -> list[str]:
    """The row's columns that attr does not name: what a missing one may be called."""
    return [name for name in value if name not in (attr.messages, attr.images, attr.system, attr.videos)]


def _absent(value: dict[str, Any], attr: Attributes) -> str:
    """A hint where the row has no column of images under the name that attr gives."""
    if attr.images is None or attr.images in value:
        return ""
    close = nearest(attr.images, _unnamed(value, attr))
    return f". There is no key {attr.images!r} (attr.images)" + (f", did you mean {close!r}?" if close else "")


def _unread(value: dict[str, Any], attr: Attributes) -> tuple[str, ...]:
    """What is said about columns that a person may think are read."""
    found = [name for name in SPOKEN if value.get(name) and _given(value[name])]
    read = (attr.messages, attr.images, attr.videos, attr.system)
    return tuple(f"{name!r} is not read, attr does not name it" for name in found if name not in read)


def _check_order(turns: list[Turn]) -> None:
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * (len(spoken) // 2)
    if not spoken or spoken != expected:
        raise UserError(
            f"turns are {', '.join(roles)}; expected an optional system, "
            "then user and assistant in turn, the answer last"
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
