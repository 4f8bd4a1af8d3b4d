"""What one small model is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCABULARY = 512
"""Rows of every model's embedding."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model's Hugging Face classes, its tokens, and its small configuration."""

    title: str
    model: str
    """Class of `transformers`."""
    config: Callable[[dict[str, int]], Any]
    """The configuration, from the ids of the tokens."""

    tokens: tuple[str, ...]
    """The tokenizer's added tokens, in the model's order."""
    shown: frozenset[str]
    """Those a decoder shows as text: one id each, but not special."""
    words: int = VOCABULARY
    """Size of the tokenizer, added tokens included."""
    digits: str = r"\p{N}"
    """How numbers are cut before tokenising."""
    nfc: bool = False
    """The tokenizer composes characters first."""
    stops: tuple[str, ...]
    """Tokens that end a generation."""
    eos: str
    chat_template: str
    """File beside `make_checkpoint.py`."""

    processor: str
    image_processor: str
    """PIL image processor, "module:class"; the folder names it without the `Pil`."""
    sizes: dict[str, int]
    """The image processor's bounds."""
    video_processor: str
    """Named so that the stock AutoProcessor loads the folder where torchvision is installed."""
    pad: str = "<|endoftext|>"
