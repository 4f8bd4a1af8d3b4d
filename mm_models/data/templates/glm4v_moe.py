"""GLM-4.5V's conversation format.

    [gMASK]<sop><|system|>\\n{system}<|user|>\\n{user}[/nothink]<|assistant|>\\n<think>{thought}</think>\\n{answer}<|user|>...

What is trained, and nothing else: each answer; its end token, which is the next `<|user|>` (see `glm`); and a thought
the data really holds, with its two tags. The empty `<think></think>` the template adds is not trained, nor is an image
inside an answer.

As the model's template does: answers are stripped, and thoughts are kept only after the last user turn (a row that
loses one is noted). Inside an answer `<|begin_of_box|>` and `<|end_of_box|>` are tokens; a user turn may end in
`/nothink`.
"""

from __future__ import annotations

import re

from mm_models.data.templates.base import Piece, has_text
from mm_models.data.templates.glm import BOXES, Answer, GlmTemplate, token
from mm_models.errors import UserError

THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
NO_THINK = "/nothink"
DROPPED = "the thought of an earlier turn is left out, as the template does"


class Glm4vMoeTemplate(GlmTemplate):
    """Template `glm4v_moe`."""

    tokens = (*GlmTemplate.tokens, "<think>", "</think>")
    optional_tokens = (NO_THINK, *BOXES)
    thinking_switch = True

    def content_tokens(self, role: str) -> tuple[str, ...]:
        return {"user": (NO_THINK,), "assistant": ("<think>", "</think>", *BOXES)}.get(role, ())

    def question(self, text: str) -> list[Piece]:
        body = text.removesuffix(NO_THINK)
        marked = body != text or not self.enable_thinking
        return self.split(body) + ([token(NO_THINK)] if marked else [])

    def answer(self, text: str, *, last: bool, trained: bool) -> Answer:
        thought, answer = _split_thought(text)
        dropped, thought = bool(thought) and not last, thought if last else ""
        thinks = {"trained": trained and bool(thought), "fixed": not thought}
        pieces = [
            Piece(text="<think>", token=True, **thinks),
            *self.split(thought, trained=trained),
            Piece(text="</think>", token=True, **thinks),
        ]
        if answer:
            pieces += [Piece(text="\n", **thinks), *self.split(answer, trained=trained, tokens=BOXES)]
        return Answer(pieces=pieces, text=has_text(thought + answer), note=DROPPED if dropped else None)


def _split_thought(text: str) -> tuple[str, str]:
    """(thought, answer) of an assistant turn, both stripped. More than one think block, or an open one, is refused."""
    if "<think>" not in text and "</think>" not in text:
        return "", text.strip()
    found = THOUGHT.fullmatch(text)
    if found is None or any(tag in part for part in found.groups() for tag in ("<think>", "</think>")):
        raise UserError(f"an answer holds at most one <think>...</think> block, at its start; got {text[:60]!r}.")
    return found["thought"].strip(), found["answer"].strip()
