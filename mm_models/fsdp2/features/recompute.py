"""Recompute: the named modules keep only their inputs for the backward pass and run their forward again there.

Top-k cannot flip: the experts that every mixture of experts inside a wrapped call chose are noted in the forward pass and replayed
in the second one. In the second pass the router's scores may differ in the last bit (other kernels, a tie), and then a token would
be differentiated through experts that it never went to. A mixture of experts has an attribute `replay`: None, or an object with
`chosen()`, the indices to use or None, and `note(indices)`, called once each per forward, in this order.

A wrapped module inside a wrapped module works: the inner call, made again by the outer one, replays what the outer noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


def apply(model: nn.Module, names: Iterable[str], *, use_reentrant: bool = False) -> None:
    """Wrap the forward of the modules `names` of `model`, in place. Parameter names stay.

    Before `fully_shard`, whose hooks then run around the wrapped forward, and before `offload.apply`, which then keeps the inputs
    elsewhere. `use_reentrant` chooses PyTorch's older mechanism; the numbers are the same.
    """
    for name in names:
        _wrap(model.get_submodule(name), name, use_reentrant)


def _wrap(module: nn.Module, name: str, use_reentrant: bool) -> None:
    assert "forward" not in vars(module), f"{name}: its forward is wrapped already; recompute comes first and once"
    forward, experts = module.forward, [part for part in module.modules() if hasattr(part, "replay")]
    # The state of the generator is read back from the device for each call: only where something is drawn from it.
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": _draws(module)}

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # As positions: only positional tensors are inputs in the eyes of autograd and of the hooks of offload.
        leaves, structure = tree_flatten((args, kwargs))
        call = Choices(experts)
        if not use_reentrant:
            return checkpoint(
                _of_leaves(forward, structure), *leaves, context_fn=lambda: (call.noting, call.replaying), **options
            )
        anchor = _anchor(leaves, module)
        if anchor is None:
            return forward(*args, **kwargs)
        return checkpoint(_twice(_of_leaves(forward, structure), call), anchor, *leaves, **options)

    module.forward = recomputed


def _of_leaves(forward: Callable, structure) -> Callable:
    def run(*leaves):
        args, kwargs = tree_unflatten(list(leaves), structure)
        return forward(*args, **kwargs)

    return run


def _twice(run: Callable, call: Choices) -> Callable:
    """For the reentrant mechanism, which calls one function in both passes: note at first, replay from then on."""
    phases = [call.noting]

    def either(anchor, *leaves):
        with phases.pop() if phases else call.replaying:
            return run(*leaves)

    return either


def _anchor(leaves: list, module: nn.Module) -> Tensor | None:
    """An input that requires a gradient where only parameters do, or the reentrant mechanism gives them none; None: nothing does."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return torch.empty(0)
    return torch.empty(0, requires_grad=True) if any(p.requires_grad for p in module.parameters()) else None


def _draws(module: nn.Module) -> bool:
    """Whether a forward of `module` in training draws random numbers."""
    return any(
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0) or getattr(part, "attention_dropout", 0)
        for part in module.modules()
    )


class Choices:
    """The experts chosen in one wrapped call, by each of `experts`. Any number of calls may wait for their backward pass."""

    def __init__(self, experts: list[nn.Module]):
        kept: list[list[Tensor]] = [[] for _ in experts]
        self.noting = _Phase(experts, kept, _Noting)
        self.replaying = _Phase(experts, kept, _Replaying)


class _Phase:
    """While entered, each mixture of experts has its `replay`. May be entered again: a graph kept for two backward passes does."""

    def __init__(self, experts: list[nn.Module], kept: list[list[Tensor]], kind: type):
        self.experts, self.kept, self.kind = experts, kept, kind

    def __enter__(self) -> None:
        self.before = [part.replay for part in self.experts]
        for part, kept in zip(self.experts, self.kept):
            part.replay = self.kind(kept, part.replay)

    def __exit__(self, *exception) -> None:
        for part, before in zip(self.experts, self.before):
            part.replay = before


class _Noting:
    def __init__(self, kept: list[Tensor], outer):
        self.kept, self.outer = kept, outer

    def chosen(self) -> Tensor | None:
        return self.outer.chosen() if self.outer else None

    def note(self, indices: Tensor) -> None:
        self.kept.append(indices)
        if self.outer:
            self.outer.note(indices)


class _Replaying:
    def __init__(self, kept: list[Tensor], outer):
        self.left = iter(kept)

    def chosen(self) -> Tensor:
        return next(self.left)

    def note(self, indices: Tensor) -> None:
        """What is replayed is known."""
