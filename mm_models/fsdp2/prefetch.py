"""Gathering the parameters of the next groups early, in the order in which the groups really run.

The order is not read from names or from the configuration: the first forward is watched. Each group then gathers the next ones
when it starts; in backward, the ones before it, among those whose output asks for a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves


@dataclass(kw_only=True)
class Prefetch:
    """`forward` and `backward`: how many groups ahead. 0 leaves FSDP's own rule (next all-gather issued when it is needed)."""

    forward: int
    backward: int
    order: list[FSDPModule] = field(default_factory=list)
    differentiable: set[FSDPModule] = field(default_factory=set)

    def watch(self, model: nn.Module) -> None:
        """Watch the next forward of `model` that can be differentiated, then set the lists and stop watching."""
        if not self.forward and not self.backward:
            return
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]
        for module in model.modules():
            if isinstance(module, FSDPModule) and module is not model:
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave))

    def _begin(self, module, args) -> None:
        self.order.clear()
        self.differentiable.clear()

    def _enter(self, module, args) -> None:
        if module not in self.order:
            self.order.append(module)

    def _leave(self, module, args, output) -> None:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            self.differentiable.add(module)

    def _end(self, module, args, output) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        _link(self.order, self.forward, "set_modules_to_forward_prefetch")
        back = [group for group in reversed(self.order) if group in self.differentiable]
        _link(back, self.backward, "set_modules_to_backward_prefetch")
        for hook in self._hooks:
            hook.remove()


def _link(order: list[FSDPModule], ahead: int, setter: str) -> None:
    for at, group in enumerate(order):
        if ahead:
            getattr(group, setter)(order[at + 1 : at + 1 + ahead])
