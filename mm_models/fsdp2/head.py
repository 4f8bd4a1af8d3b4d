"""The language-model head, with the loss inside it."""

from __future__ import annotations

import torch
from torch import nn

from mm_models.components.loss import chunked_cross_entropy, dynamic_chunk, summed_cross_entropy


class Head(nn.Linear):
    """`lm_head.weight` (V, H), no bias. The loss is computed in this module's call, where FSDP has gathered the weight.

    `chunk`: tokens whose logits exist at a time; None computes all logits at once, bit-equal with Hugging Face.
    `total_chunk`: the same, per micro-batch by `dynamic_chunk`. At most one of the two is set.
    """

    def __init__(self, hidden: int, vocabulary: int, *, dtype: torch.dtype | None = None, device=None):
        super().__init__(hidden, vocabulary, bias=False, dtype=dtype, device=device)
        self.chunk: int | None = None
        self.total_chunk: int | None = None

    def forward(self, hidden: torch.Tensor, shifted: torch.Tensor | None = None) -> torch.Tensor:
        """(B, S, H) -> logits (B, S, V); with shifted labels (B, S) the summed cross entropy, an fp32 scalar."""
        if shifted is None:
            return super().forward(hidden)
        chunk = dynamic_chunk(len(hidden), self.total_chunk) if self.total_chunk else self.chunk
        if chunk is None:
            return summed_cross_entropy(super().forward(hidden), shifted)
        return chunked_cross_entropy(hidden, self.weight, shifted, chunk=chunk)
