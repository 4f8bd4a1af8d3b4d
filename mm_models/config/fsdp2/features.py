"""`features`: the loss, and what trades time for memory. A plan whose switch is off is checked and kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_models.config.fsdp2.kinds import Amount, Count, Patterns, Text, only
from mm_models.config.strict import StrictModel


class LossConfig(StrictModel):
    """`default`: mean over non-empty micro-batches of (sum of CE / labelled tokens). `per_token_loss`: sum of CE of the step /
    its labelled tokens. `raw`: Hugging Face's own loss of each micro-batch."""

    loss_type: Literal["default", "per_token_loss", "raw"] = "default"
    router_aux_loss_coef: Amount = 0.0


class ChunkLossPlan(StrictModel):
    apply_module: Text = "lm_head"
    chunk_size: Count = 1024
    """Tokens whose logits exist at once, with enable_chunk_loss."""
    total_chunk_size: Count = 4096
    """The same over the whole micro-batch, with enable_dynamic_chunk_loss."""


class RecomputePlan(StrictModel):
    apply_modules: Patterns = Field(default_factory=list)
    use_reentrant: bool = False


class OffloadPlan(StrictModel):
    apply_modules: Patterns = Field(default_factory=list)


class BalancePlan(StrictModel):
    max_dup_experts_num: Count = 2


class Features(StrictModel):
    loss_cfg: LossConfig = LossConfig()
    enable_chunk_loss: bool = False
    enable_dynamic_chunk_loss: bool = False
    chunkloss_plan: ChunkLossPlan = ChunkLossPlan()
    recompute: bool = False
    recompute_plan: RecomputePlan = RecomputePlan()
    enable_activation_offload: bool = False
    activation_offload_plan: OffloadPlan = OffloadPlan()
    enable_ep_balance: Annotated[bool, only(False, why="balancing of expert load is not there yet")] = False
    ep_balance_plan: BalancePlan = BalancePlan()

    @property
    def chunked(self) -> bool:
        return self.enable_chunk_loss or self.enable_dynamic_chunk_loss

    @model_validator(mode="after")
    def _check(self):
        if self.enable_chunk_loss and self.enable_dynamic_chunk_loss:
            raise ValueError(
                "enable_chunk_loss and enable_dynamic_chunk_loss exclude each other; set one of them to false"
            )
        if self.chunked and self.loss_cfg.loss_type == "raw":
            switch = "enable_chunk_loss" if self.enable_chunk_loss else "enable_dynamic_chunk_loss"
            raise ValueError(
                f"loss_cfg.loss_type raw is Hugging Face's own loss and cannot be cut into chunks; set {switch} to false or "
                "loss_type to default (the same number for one micro-batch)"
            )
        for switch, plan in (
            ("recompute", "recompute_plan"),
            ("enable_activation_offload", "activation_offload_plan"),
        ):
            if getattr(self, switch) and not getattr(self, plan).apply_modules:
                raise ValueError(
                    f"{switch} is true and {plan}.apply_modules is empty: nothing would happen. Name modules there or set {switch} to false"
                )
        return self
