"""Next-token cross entropy: of whole logits, or chunk by chunk without ever holding them.

`chunked_cross_entropy` computes loss and gradients in the forward pass, a few tokens at a time, so that no (tokens, vocabulary)
tensor exists. What it holds instead until the backward pass is the gradient of the head's weight; `peak_bytes` says beforehand
which of the two is smaller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE = -100
"""A label that is not trained on."""

BLOCK = 16384
"""Rows of the head's weight whose gradient is summed at a time."""


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """(B, S) labels aligned with their own tokens -> aligned with the token that predicts them; the last column is ignored."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def count_labels(labels: torch.Tensor) -> int:
    """How many tokens of (B, S) labels are trained on after the shift."""
    return int((labels[:, 1:] != IGNORE).sum())


def summed_cross_entropy(logits: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies in fp32: logits (..., V), shifted labels (...). Zero with a gradient where none is labelled.

    One call with `reduction="sum"`: summing per-token losses is one ulp off Hugging Face's mean in half of the cases.
    """
    logits = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits, shifted.reshape(-1), ignore_index=IGNORE, reduction="sum")


def dynamic_chunk(batch: int, total: int) -> int:
    """Tokens per chunk of a micro-batch of `batch` sequences: batch x p, p the largest power of two with batch x p <= total (or 1)."""
    return batch * (1 << (max(1, total // batch).bit_length() - 1))


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, shifted: torch.Tensor, *, chunk: int
) -> torch.Tensor:
    """The same sum from hidden states (..., H), the head's weight (V, H) and shifted labels (...), `chunk` tokens at a time.

    Numbers: each chunk's arithmetic is the unchunked one; sums over chunks are fp32, so that bf16 error does not grow with their
    number. The gradients are computed in the forward pass for an incoming gradient of 1, and the backward pass, which runs once,
    multiplies. Nothing waits for the device; chunks without labels are skipped where labels lie in host memory and add zero elsewhere.
    """
    grads = torch.is_grad_enabled() and (hidden.requires_grad, weight.requires_grad)
    return _Chunked.apply(hidden, weight, shifted, chunk, grads or (False, False))


def peak_bytes(*, tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, chunk: int | None) -> int:
    """Most bytes that loss and backward of a trained head hold at one time beyond their inputs, whole (None) or in chunks.

    Whole: logits, their fp32 log-softmax and two gradients of it. Chunks: the same for `chunk` tokens, once, and both inputs'
    gradients, the weight's in fp32 while there is more than one chunk. So several chunks pay when tokens exceed about half of hidden.
    """
    size = torch.tensor([], dtype=dtype).element_size()
    rows = tokens if chunk is None else min(chunk, tokens)
    # The product for log_softmax, its fp32 copy when it is not fp32 itself, the result.
    forward = rows * vocabulary * (size + 4 + (4 if size < 4 else 0))
    grad, weight, inputs = rows * vocabulary * size, vocabulary * hidden * size, tokens * hidden * size
    if chunk is None:
        return max(forward, 12 * rows * vocabulary, grad + weight + inputs)
    if rows == tokens:
        return inputs + max(forward, grad + weight)
    total = 4 * vocabulary * hidden
    if size == 4:
        return inputs + total + forward
    block = min(BLOCK, vocabulary) * hidden * (size + 4)
    return inputs + total + max(forward, grad + block, weight)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, shifted, chunk, wanted):
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), shifted.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        on_host = labels.device.type == "cpu"
        # Attributes, not save_for_backward: these are results, which neither recompute nor offload may touch.
        ctx.grad_rows = torch.zeros_like(rows) if wanted[0] else None
        ctx.grad_weight, ctx.shape = None, hidden.shape
        total = None
        if wanted[1] and len(rows) > chunk:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(rows), chunk):
            part, targets = rows[start : start + chunk], labels[start : start + chunk]
            if on_host and not (targets != IGNORE).any():
                continue
            added, grad = _one_chunk(part, weight, targets, any(wanted))
            loss += added
            if wanted[0]:
                torch.mm(grad, weight, out=ctx.grad_rows[start : start + chunk])
            if wanted[1]:
                if total is None:
                    total = grad.t() @ part  # the only chunk: nothing to sum
                else:
                    _add_product(total, grad, part)
            del grad  # or two chunks' would exist at a time
        if wanted[1]:
            ctx.grad_weight = torch.zeros_like(weight) if total is None else total.to(weight.dtype)
        return loss

    @staticmethod
    def backward(ctx, incoming):
        if not hasattr(ctx, "grad_rows"):
            raise RuntimeError("the chunked loss was sent backward twice; its gradients exist once")
        grad_rows, grad_weight = ctx.grad_rows, ctx.grad_weight
        del ctx.grad_rows, ctx.grad_weight
        if grad_rows is not None:
            grad_rows = grad_rows.mul_(incoming).view(ctx.shape)
        if grad_weight is not None:
            grad_weight.mul_(incoming)
        return grad_rows, grad_weight, None, None, None


def _one_chunk(rows, weight, labels, with_grad: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed loss of (n, H) rows, and its gradient (n, V) by the logits in their dtype: softmax minus one at the label."""
    scores = torch.log_softmax(F.linear(rows, weight), dim=-1, dtype=torch.float32)
    loss = F.nll_loss(scores, labels, ignore_index=IGNORE, reduction="sum")
    if not with_grad:
        return loss, None
    labelled = (labels != IGNORE).unsqueeze(1)
    at = labels.unsqueeze(1).clamp_min(0)
    grad = scores.exp_().mul_(labelled).scatter_add_(1, at, -labelled.to(scores.dtype))
    return loss, grad.to(rows.dtype)


def _add_product(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """`total` (V, H) fp32 += grad.T @ rows. In lower precision by blocks of the vocabulary, or a second (V, H) would exist."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), rows)
        return
    for start in range(0, len(total), BLOCK):
        total[start : start + BLOCK] += grad[:, start : start + BLOCK].t() @ rows
