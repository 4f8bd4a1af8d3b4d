"""What the conversation formats of the GLM vision models share.

    [gMASK]<sop><|system|>\\n{system}<|user|>\\n{user}<|assistant|>\\n{answer}<|user|>...

An answer ends where the next `<|user|>` begins, and the model stops on it: that token is trained after every answer.
After the last one the chat template writes nothing, so a `<|user|>` of our own ends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mm_models.data.rows import Turn
from mm_models.data.templates.base import ChatTemplate, Piece, Rendered

BOXES = ("<|begin_of_box|>", "<|end_of_box|>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What an assistant turn becomes."""

    pieces: list[Piece]
    text: bool
    """It has text, thought or answer."""
    note: str | None = None


class GlmTemplate(ChatTemplate):
    """Base class; a subclass says what stands behind `<|assistant|>\\n`."""

    tokens = (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    )
    image_token = "<|image|>"
    end_token = "<|user|>"

    def render(self, turns: Sequence[Turn]) -> Rendered:
        last_user = max(index for index, turn in enumerate(turns) if turn.role == "user")
        pieces = [token("[gMASK]"), token("<sop>")]
        answered, ends_answer, notes = False, False, []
        for index, turn in enumerate(turns):
            pieces.append(Piece(text=f"<|{turn.role}|>", token=True, trained=ends_answer))
            pieces.append(Piece(text="\n"))
            ends_answer = False
            if turn.role == "assistant":
                ends_answer = index > last_user or not self.mask_history
                answer = self.answer(turn.text, last=index > last_user, trained=ends_answer)
                pieces += answer.pieces
                answered = answered or (ends_answer and answer.text)
                notes += [answer.note] if answer.note and answer.note not in notes else []
            elif turn.role == "user":
                pieces += self.question(turn.text)
            else:
                pieces += self.split(turn.text)
        pieces.append(Piece(text=self.end_token, token=True, trained=ends_answer, ours=True))
        return Rendered(pieces=tuple(pieces), answered=answered, notes=tuple(notes))

    def answer(self, text: str, *, last: bool, trained: bool) -> Answer:
        """An assistant turn; `last`: behind the last user turn."""
        raise NotImplementedError

    def question(self, text: str) -> list[Piece]:
        """A user turn."""
        return self.split(text)

    def image_pieces(self) -> list[Piece]:
        start, end = (Piece(text=f"<|{side}_of_image|>", token=True, fixed=True) for side in ("begin", "end"))
        return [start, Piece(text=self.image_token, image=True, fixed=True), end]


def token(text: str) -> Piece:
    """A template token that is not trained."""
    return Piece(text=text, token=True)
