"""GLM-4.1V's conversation format.

    [gMASK]<sop><|system|>\\n{system}<|user|>\\n{user}<|assistant|>\\n{answer}<|user|>...

What is trained, and nothing else: each answer as the data has it, and its end token, which is the next `<|user|>` (see
`glm`). The template adds nothing: a thought is part of the answer's text, `<think>...</think><answer>...</answer>` in the
manner of the model, and `MARKUP` in an answer are tokens. An image inside an answer is not trained.

A thought, an image or outer whitespace in an answer are what a folder's template may treat in its own way (drop, strip).
A row with one is compared with the folder's template, and refused where it would be written otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from mm_models.data.rows import IMAGE_MARK, Turn
from mm_models.data.templates.base import PROBES, Encoded, has_text
from mm_models.data.templates.glm import BOXES, Answer, GlmTemplate

MARKUP = ("<think>", "</think>", "<answer>", "</answer>", *BOXES)


class Glm4vTemplate(GlmTemplate):
    """Template `glm4v`."""

    optional_tokens = MARKUP
    probes = (
        PROBES[0],
        (
            Turn(role="system", text="rules"),
            Turn(role="user", text=f"{IMAGE_MARK}first {IMAGE_MARK}\n"),
            Turn(role="assistant", text="an answer"),
            Turn(role="user", text="second"),
            Turn(role="assistant", text="another"),
        ),
    )

    def encode(self, turns: Sequence[Turn], image_tokens: Sequence[int]) -> Encoded:
        if any(turn.role == "assistant" and _is_unusual(turn.text) for turn in turns):
            self._prove(turns, "Write the answer as the folder's chat template would.")
        return super().encode(turns, image_tokens)

    def content_tokens(self, role: str) -> tuple[str, ...]:
        return MARKUP if role == "assistant" else ()

    def answer(self, text: str, *, last: bool, trained: bool) -> Answer:
        return Answer(pieces=self.split(text, trained=trained, tokens=MARKUP), text=has_text(text))


def _is_unusual(text: str) -> bool:
    return text != text.strip() or not text or any(word in text for word in (IMAGE_MARK, *MARKUP))
