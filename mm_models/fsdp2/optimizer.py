"""AdamW over the pieces of parameters that this rank holds.

torch's optimizer sees plain tensors that share memory with the parameters' local shards: the kernels are the fused ones where
they exist, parameters of different meshes share one optimizer, and nothing goes through DTensor. Parameters are fp32 masters.
Biases and one-dimensional parameters have no weight decay. Frozen parameters are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from mm_models.config.fsdp2.training import Training
from mm_models.errors import UserError
from mm_models.fsdp2.shards import Shard, shard_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A trained parameter and `master`, the plain tensor over its local shard that the optimizer steps."""

    name: str
    parameter: torch.nn.Parameter
    master: torch.nn.Parameter
    decays: bool

    def follow(self) -> None:
        """Point `master` at the parameter's memory, which FSDP moves in its first forward where it pads, and at its gradient."""
        local = _local(self.parameter)
        if self.master.data_ptr() != local.data_ptr():
            self.master.data = local
        self.master.grad = None if self.parameter.grad is None else _local(self.parameter.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def has_fused_kernel(device: torch.device) -> bool:
    """Whether torch's fused AdamW runs on `device`: found out by one step of one element."""
    probe = torch.nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        torch.optim.AdamW([probe], fused=True).step()
    except RuntimeError:  # what torch raises for a kernel it does not have; the run then says it has none
        return False
    return True


class Optimizer:
    """`step(rate)` once a step; `steps` counts them. The state exists from the start, zero. `fused`: whether `adam_fused` was
    asked for and there is such a kernel here."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], training: Training):
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if not trained:
            raise UserError("model.freeze freezes every parameter: there is nothing to train. Leave a part out of it.")
        for name, parameter in trained.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: parameters are fp32 masters"
        self.steps, self.fused = 0, False
        self.pieces = [
            Piece(
                name=name,
                parameter=parameter,
                master=torch.nn.Parameter(_local(parameter)),
                decays=parameter.ndim > 1 and not name.endswith("bias"),
            )
            for name, parameter in trained.items()
        ]
        self._adam = self._build(training)

    def _build(self, training: Training) -> torch.optim.AdamW | None:
        """None on a rank that holds no element of a trained parameter."""
        held = [piece for piece in self.pieces if piece.master.numel()]
        groups = [
            {"params": [piece.master for piece in held if piece.decays], "weight_decay": training.weight_decay},
            {"params": [piece.master for piece in held if not piece.decays], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return None
        self.fused = training.adam_fused and has_fused_kernel(held[0].master.device)
        adam = torch.optim.AdamW(
            groups,
            lr=training.lr,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            fused=self.fused,
        )
        for piece in held:
            place = piece.master.device if self.fused else torch.device("cpu")
            adam.state[piece.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=place),
                **{name: torch.zeros_like(piece.master, requires_grad=False) for name in MOMENTS},
            }
        return adam

    def step(self, rate: float) -> None:
        """One step with the gradients that lie on the parameters, which are given up afterwards."""
        for piece in self.pieces:
            piece.follow()
            assert piece.master.grad is not None, f"{piece.name} has no gradient"
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self.steps += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        for piece in self.pieces:
            piece.parameter.grad = piece.master.grad = None

    def moments(self) -> dict[str, dict[str, Shard]]:
        """Parameter name -> moment name -> this rank's box of it, in the optimizer's own memory. Empty boxes included."""
        return {
            piece.name: {
                moment: box.like(self._adam.state[piece.master][moment] if piece.master.numel() else box.local)
                for moment in MOMENTS
            }
            for piece in self.pieces
            for box in [shard_of(piece.parameter)]
        }

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps; the moments have been filled through `moments`."""
        self.steps = steps
        if self._adam is not None:
            for state in self._adam.state.values():
                state["step"].fill_(float(steps))

    @property
    def undecayed(self) -> list[str]:
        """Names of trained parameters without weight decay."""
        return [piece.name for piece in self.pieces if not piece.decays]
