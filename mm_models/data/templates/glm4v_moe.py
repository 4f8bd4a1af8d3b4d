"""GLM-4.5V's conversation format.

    [gMASK]<sop><|system|>\\n{system}<|user|>\\n{user}[/nothink]<|assistant|>\\n<think>{thought}</think>\\n{answer}<|user|>...

What is trained, and nothing else: each answer; its end token, which is the next `<|user|>` (GLM stops on it) and
after the last answer a `<|user|>` of our own, which the template does not write; and a thought the data really holds,
with its two tags. The empty `<think></think>` the template adds is not trained, nor is an image inside an answer.

As the model's template does: answers are stripped, and thoughts are kept only after the last user turn (a row that
loses one is noted). Inside an answer `<|begin_of_box|>` and `<|end_of_box|>` are tokens; a user turn may end in
`/nothink`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mm_models.data.rows import Turn
from mm_models.data.templates.base import ChatTemplate, Piece, Rendered
from mm_models.errors import UserError

THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
BOXES = ("<|begin_of_box|>", "<|end_of_box|>")
NO_THINK = "/nothink"


class Glm4vMoeTemplate(ChatTemplate):
    """Template `glm4v_moe`."""

    tokens = (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"),
        *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    )
    optional_tokens = (NO_THINK, *BOXES)
    image_token = "<|image|>"
    end_token = "<|user|>"

    def render(self, turns: Sequence[Turn]) -> Rendered:
        last_user = max(index for index, turn in enumerate(turns) if turn.role == "user")
        pieces = [_token("[gMASK]"), _token("<sop>")]
        answered, dropped, ends_answer = False, False, False
        for index, turn in enumerate(turns):
            pieces.append(Piece(text=f"<|{turn.role}|>", token=True, trained=ends_answer))
            pieces.append(Piece(text="\n"))
            ends_answer = False
            if turn.role == "assistant":
                trained = index > last_user or not self.mask_history
                thought, answer = _split_thought(turn.text)
                if index < last_user:
                    dropped, thought = dropped or bool(thought), ""
                pieces += self._answer(thought, answer, trained)
                answered = answered or (trained and bool(thought or answer))
                ends_answer = trained
            elif turn.role == "user":
                pieces += self._question(turn.text)
            else:
                pieces += self.split(turn.text)
        pieces.append(Piece(text=self.end_token, token=True, trained=ends_answer))
        notes = ("the thought of an earlier turn is left out, as the template does",) if dropped else ()
        return Rendered(pieces=tuple(pieces), answered=answered, notes=notes)

    def image_pieces(self) -> list[Piece]:
        return [_token("<|begin_of_image|>"), Piece(text=self.image_token, image=True), _token("<|end_of_image|>")]

    def content_tokens(self, role: str) -> tuple[str, ...]:
        return {"user": (NO_THINK,), "assistant": ("<think>", "</think>", *BOXES)}.get(role, ())

    def _question(self, text: str) -> list[Piece]:
        body = text.removesuffix(NO_THINK)
        marked = body != text or not self.enable_thinking
        return self.split(body) + ([_token(NO_THINK)] if marked else [])

    def _answer(self, thought: str, answer: str, trained: bool) -> list[Piece]:
        thinks = trained and bool(thought)
        pieces = [Piece(text="<think>", token=True, trained=thinks)]
        pieces += self.split(thought, trained=thinks)
        pieces.append(Piece(text="</think>", token=True, trained=thinks))
        if answer:
            pieces.append(Piece(text="\n", trained=thinks))
            for part in re.split(f"({'|'.join(map(re.escape, BOXES))})", answer):
                pieces += (
                    [Piece(text=part, token=True, trained=trained)]
                    if part in BOXES
                    else self.split(part, trained=trained)
                )
        return pieces


def _token(text: str) -> Piece:
    return Piece(text=text, token=True)


def _split_thought(text: str) -> tuple[str, str]:
    """(thought, answer) of an assistant turn, both stripped. More than one think block, or an open one, is refused."""
    if "<think>" not in text and "</think>" not in text:
        return "", text.strip()
    found = THOUGHT.fullmatch(text)
    if found is None or any(tag in part for part in found.groups() for tag in ("<think>", "</think>")):
        raise UserError(f"an answer holds at most one <think>...</think> block, at its start; got {text[:60]!r}.")
    return found["thought"].strip(), found["answer"].strip()
