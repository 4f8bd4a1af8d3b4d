"""What all chat templates share: pieces, their token ids, and the proof that the model's own template says the same.

A template renders a conversation into pieces. A piece is a template token (one id, looked up), an image, or text.
Text is always tokenised without the tokenizer's added tokens: `<|image|>` typed by a user stays nine characters of
text. Pieces carry the trained flag, so labels come by construction and never from a search in the ids.

`ChatTemplate` checks itself when it is made: every template token exists in the tokenizer, and probe conversations
render to the very string the folder's own chat template gives. A template of another model is refused there, before
any row.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from mm_models.data.rows import IMAGE_MARK, Turn
from mm_models.errors import UserError

Span = tuple[int, int]

PROBES = (
    (Turn(role="user", text="one"), Turn(role="assistant", text="two")),
    (
        Turn(role="system", text="rules"),
        Turn(role="user", text=f"{IMAGE_MARK}first {IMAGE_MARK}"),
        Turn(role="assistant", text="\n an answer \n"),
        Turn(role="user", text="second"),
        Turn(role="assistant", text=f"with a picture {IMAGE_MARK} inside"),
    ),
    (
        Turn(role="user", text="q"),
        Turn(role="assistant", text="<think>old</think>a"),
        Turn(role="user", text="q"),
        Turn(role="assistant", text="<think>\nnew\n</think>\n\na"),
    ),
    (Turn(role="user", text="q"), Turn(role="assistant", text="")),
)
"""Conversations that take every branch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of a rendered conversation."""

    text: str
    token: bool = False
    """`text` is a template token: one id."""
    image: bool = False
    """`text` is the image token, repeated to the number of features when encoded."""
    trained: bool = False
    fixed: bool = False
    """Never trained, with `train_on_prompt` neither: an image, or what the template writes without a meaning."""
    ours: bool = False
    """The folder's chat template does not write it: the end token after a last answer that it leaves open."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """Pieces of a whole conversation, and what the reader of the report should know."""

    pieces: tuple[Piece, ...]
    answered: bool
    """Some trained answer has text; without it a sample would teach end tokens alone."""
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids of a conversation and the half-open ranges of them that are trained."""

    ids: tuple[int, ...]
    trained: tuple[Span, ...]
    images: int
    answered: bool
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """Base class; a subclass names its tokens and renders turns."""

    tokens: ClassVar[tuple[str, ...]]
    """Template tokens the tokenizer must have, each as one id."""
    optional_tokens: ClassVar[tuple[str, ...]] = ()
    """Template words that are one id where the tokenizer has them, and text where not."""
    image_token: ClassVar[str]
    probes: ClassVar[tuple[tuple[Turn, ...], ...]] = PROBES
    """Conversations that must render as the folder's own template renders them."""
    thinking_switch: ClassVar[bool] = False
    """The folder's template takes `enable_thinking`."""

    end_token: ClassVar[str]
    """The token that ends an answer."""

    def __init__(
        self,
        processor: Any,
        *,
        name: str,
        enable_thinking: bool = True,
        mask_history: bool = False,
        train_on_prompt: bool = False,
    ):
        self.name, self.enable_thinking = name, enable_thinking
        self.mask_history, self.train_on_prompt = mask_history, train_on_prompt
        tokenizer = processor.tokenizer
        added = tokenizer.get_added_vocab()
        if not (enable_thinking or self.thinking_switch):
            raise UserError(f"template {name!r} has no enable_thinking to turn off; take the key out of data.json.")
        missing = [token for token in self.tokens if token not in added]
        if missing:
            raise UserError(
                f"template {name!r} needs the tokens {', '.join(missing)}, which the tokenizer of "
                f"{tokenizer.name_or_path!r} does not have. Name the template of this model."
            )
        self._ids = {token: added[token] for token in (*self.tokens, *self.optional_tokens) if token in added}
        self._literals = tuple(added)
        self._forbidden = frozenset(added.values())
        self._plain = _without_added_tokens(tokenizer)
        self._processor = processor
        for probe in self.probes:
            self._prove(probe, "Name the template of this model.")

    def render(self, turns: Sequence[Turn]) -> Rendered:
        """Pieces of a conversation; images stand where `IMAGE_MARK` stands in the text. Raises UserError on text the
        format cannot hold."""
        raise NotImplementedError

    def encode(self, turns: Sequence[Turn], image_tokens: Sequence[int]) -> Encoded:
        """Ids and trained ranges; image `i` takes `image_tokens[i]` ids. The caller has matched images and marks."""
        rendered = self.render(turns)
        if self.train_on_prompt:
            rendered = _all_trained(rendered, turns)
        slots = sum(piece.image for piece in rendered.pieces)
        if slots != len(image_tokens):
            raise UserError(
                f"{len(image_tokens)} images, {slots} left after the template (an earlier turn's thought is dropped)."
            )
        ids: list[int] = []
        flags = bytearray()
        counts = iter(image_tokens)
        for is_text, group in itertools.groupby(rendered.pieces, key=self._is_text):
            if is_text:
                self._encode_text(list(group), ids, flags)
                continue
            for piece in group:
                repeat = next(counts) if piece.image else 1
                ids += [self._ids[piece.text]] * repeat
                flags += bytes([piece.trained]) * repeat
        return Encoded(
            ids=tuple(ids),
            trained=_spans(flags),
            images=slots,
            answered=rendered.answered,
            notes=rendered.notes + self._literal_notes(turns),
        )

    def split(self, text: str, *, trained: bool = False, tokens: Sequence[str] = ()) -> list[Piece]:
        """Text as pieces: image marks become images, which are never trained, and `tokens` in it template tokens."""
        pieces: list[Piece] = []
        for part in re.split(f"({'|'.join(map(re.escape, (IMAGE_MARK, *tokens)))})", text):
            if part == IMAGE_MARK:
                pieces += self.image_pieces()
            elif part:
                pieces.append(Piece(text=part, token=part in tokens, trained=trained))
        return pieces

    def image_pieces(self) -> list[Piece]:
        """One image as the format writes it."""
        raise NotImplementedError

    def _is_text(self, piece: Piece) -> bool:
        return not (piece.image or (piece.token and piece.text in self._ids))

    def _encode_text(self, pieces: Sequence[Piece], ids: list[int], flags: bytearray) -> None:
        """Tokenise neighbouring text as one string, as Hugging Face does between two special tokens.

        A token is trained when it touches a trained character: `\\n` before an answer stays untrained unless merged
        into it.
        """
        encoding = self._plain.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
        clash = self._forbidden.intersection(encoding.ids)
        if clash:
            raise UserError(f"text becomes the template tokens {sorted(clash)} in this tokenizer; reword it.")
        ids += encoding.ids
        if not any(piece.trained for piece in pieces):
            flags += bytes(len(encoding.ids))
            return
        marks = b"".join(bytes([piece.trained]) * len(piece.text) for piece in pieces)
        flags += bytes(marks.find(1, start, end) >= 0 for start, end in encoding.offsets)

    def _literal_notes(self, turns: Iterable[Turn]) -> tuple[str, ...]:
        found = [
            token
            for token in self._literals
            if any(token in turn.text and token not in self.content_tokens(turn.role) for turn in turns)
        ]
        return (f"text that looks like a template token is kept as text: {' '.join(found)}",) if found else ()

    def content_tokens(self, role: str) -> tuple[str, ...]:
        """Tokens the format gives a meaning inside turns of `role`."""
        return ()

    def _prove(self, turns: Sequence[Turn], remedy: str) -> None:
        """Refuse a conversation that the folder's own chat template writes in another way."""
        ours = "".join(piece.text for piece in self.render(turns).pieces if not piece.ours)
        messages = [{"role": turn.role, "content": _content(turn.text)} for turn in turns]
        options = {"enable_thinking": self.enable_thinking} if self.thinking_switch else {}
        theirs = self._processor.apply_chat_template(messages, tokenize=False, **options)
        if ours != theirs:
            pairs = zip(ours, theirs, strict=False)
            at = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(ours), len(theirs)))
            here = slice(max(0, at - 20), at + 20)
            raise UserError(
                f"template {self.name!r} and the chat template of {self._processor.tokenizer.name_or_path!r} differ "
                f"at character {at}: {ours[here]!r}, the folder has {theirs[here]!r}. {remedy}"
            )


def _content(text: str) -> str | list[dict[str, str]]:
    """A turn as Hugging Face message content: text alone as a string, which every chat template takes in any role."""
    if IMAGE_MARK not in text:
        return text
    parts: list[dict[str, str]] = []
    for index, part in enumerate(text.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": part}] if part else []
    return parts


def has_text(text: str) -> bool:
    """Something besides images and white space."""
    return bool(text.replace(IMAGE_MARK, "").strip())


def _all_trained(rendered: Rendered, turns: Sequence[Turn]) -> Rendered:
    """With everything trained that is not fixed."""
    return Rendered(
        pieces=tuple(dataclasses.replace(piece, trained=not piece.fixed) for piece in rendered.pieces),
        answered=any(has_text(turn.text) for turn in turns),
        notes=rendered.notes,
    )


def _spans(flags: bytearray) -> tuple[Span, ...]:
    """Half-open ranges of ones."""
    spans, start = [], flags.find(1)
    while start >= 0:
        end = flags.find(0, start)
        end = end if end >= 0 else len(flags)
        spans.append((start, end))
        start = flags.find(1, end)
    return tuple(spans)


def _without_added_tokens(tokenizer: Any) -> Any:
    """The tokenizer's own pipeline (normaliser, pre-tokeniser, model) without added tokens and post-processing."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(
        json.dumps(state | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None})
    )
