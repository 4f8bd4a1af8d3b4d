"""The conversation format of Qwen2-VL and Qwen2.5-VL (ChatML).

    <|im_start|>system\\n{system}<|im_end|>\\n<|im_start|>user\\n{user}<|im_end|>\\n<|im_start|>assistant\\n{answer}<|im_end|>\\n

What is trained, and nothing else: each answer, as the data has it, and the `<|im_end|>` that ends it. The `\\n` behind
`<|im_end|>` and an image inside an answer are not. A conversation without a system text gets the default one.
`GROUNDING` in a question or an answer are tokens: that is how the models write references and boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mm_models.data.rows import Turn
from mm_models.data.templates.base import ChatTemplate, Piece, Rendered, has_text

SYSTEM = "You are a helpful assistant."
GROUNDING = tuple(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad") for side in ("start", "end"))


class Qwen2VLTemplate(ChatTemplate):
    """Templates `qwen2vl` and `qwen2_vl`."""

    tokens = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    optional_tokens = GROUNDING
    image_token = "<|image_pad|>"
    end_token = "<|im_end|>"

    def render(self, turns: Sequence[Turn]) -> Rendered:
        if turns[0].role != "system":
            turns = (Turn(role="system", text=SYSTEM), *turns)
        pieces, answered = [], False
        for index, turn in enumerate(turns):
            trained = turn.role == "assistant" and (index == len(turns) - 1 or not self.mask_history)
            pieces += [
                Piece(text="<|im_start|>", token=True),
                Piece(text=f"{turn.role}\n"),
                *self.split(turn.text, trained=trained, tokens=self.content_tokens(turn.role)),
                Piece(text=self.end_token, token=True, trained=trained),
                Piece(text="\n"),
            ]
            answered = answered or (trained and has_text(turn.text))
        return Rendered(pieces=tuple(pieces), answered=answered)

    def image_pieces(self) -> list[Piece]:
        start, end = (Piece(text=f"<|vision_{side}|>", token=True, fixed=True) for side in ("start", "end"))
        return [start, Piece(text=self.image_token, image=True, fixed=True), end]

    def content_tokens(self, role: str) -> tuple[str, ...]:
        return GROUNDING if role in ("user", "assistant") else ()
