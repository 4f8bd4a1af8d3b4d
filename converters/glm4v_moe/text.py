"""`glm4v_moe_lm`: the GLM-4.5 decoder, a few dense layers and then mixtures of experts.

Head dimension is explicit (128 at hidden 4096 and 96 heads: not hidden / heads). q, k and v carry biases, the output
projection does not. The router weight and its correction bias, a persistent buffer, are held in fp32.
"""

from typing import Annotated, ClassVar

import pydantic
from pydantic import model_validator

from converters.parts import ALWAYS, ATTENTION, EMBEDDING, HEAD, HF, INIT, LAYER, TIED, decoder_sizes, mlp, qkv_bias
from mm_models.config.config_map import ConfigMap, Field, Required
from mm_models.config.sections import ANY, Number, Size, TextDecoderConfig
from mm_models.weights.rules import (
    EXPERT_GLU,
    EXPERT_ROW,
    GLU,
    REPLICATE,
    ROW,
    Concat,
    Experts,
    Rule,
    Same,
    WeightTable,
)  # fmt: skip


class GlmMoeText(TextDecoderConfig):
    """`num_moe_experts` null makes every layer dense; else the first `first_k_dense_replace` layers are."""

    WITHOUT_EFFECT: ClassVar = TextDecoderConfig.WITHOUT_EFFECT | {"layernorm_epsilon": ANY}

    rms_norm_eps: Number
    num_moe_experts: Size | None = None
    first_k_dense_replace: Annotated[int, pydantic.Field(ge=0)] = 0
    moe_ffn_hidden_size: Size | None = None
    n_shared_experts: Size | None = None
    moe_router_topk: Size | None = None
    moe_router_num_groups: Size = 1
    moe_router_group_topk: Size = 1
    moe_router_topk_scaling_factor: Number = 1.0
    norm_topk_prob: bool = True

    @property
    def eps(self) -> float:
        return self.rms_norm_eps

    @property
    def shared_ffn_hidden_size(self) -> int:
        return self.moe_ffn_hidden_size * self.n_shared_experts

    def is_moe(self, layer: int) -> bool:
        return self.num_moe_experts is not None and layer >= self.first_k_dense_replace

    def split_widths(self) -> list[tuple[str, int, str]]:
        if not self.num_moe_experts:
            return []
        return [
            ("num_moe_experts", self.num_moe_experts, "ep"),
            ("moe_ffn_hidden_size", self.moe_ffn_hidden_size, "etp"),
            ("shared experts' width", self.shared_ffn_hidden_size, "tp"),
        ]

    @model_validator(mode="after")
    def _check_experts(self):
        moe = ("moe_ffn_hidden_size", "n_shared_experts", "moe_router_topk")
        if self.num_moe_experts is None:
            given = [name for name in moe if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{', '.join(given)} given without num_moe_experts")
            return self
        missing = [name for name in moe if getattr(self, name) is None]
        if missing:
            raise ValueError(f"num_moe_experts {self.num_moe_experts} needs {', '.join(missing)}")
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"moe_router_topk {self.moe_router_topk} exceeds num_moe_experts {self.num_moe_experts}")
        if self.num_moe_experts % self.moe_router_num_groups or self.moe_router_group_topk > self.moe_router_num_groups:
            raise ValueError(
                f"moe_router_num_groups {self.moe_router_num_groups} must divide num_moe_experts {self.num_moe_experts} "
                f"and be at least moe_router_group_topk {self.moe_router_group_topk}"
            )
        if self.first_k_dense_replace >= self.num_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} leaves no MoE layer of {self.num_layers}; drop num_moe_experts"
            )
        return self


def _sizes(config) -> dict[str, int]:
    sizes = decoder_sizes(config)
    if config.num_moe_experts:
        sizes |= {
            "experts": config.num_moe_experts,
            "moe_ffn": config.moe_ffn_hidden_size,
            "2moe_ffn": 2 * config.moe_ffn_hidden_size,
            "shared_ffn": config.shared_ffn_hidden_size,
            "2shared_ffn": 2 * config.shared_ffn_hidden_size,
        }
    return sizes


EXPERT = HF + "mlp.experts.{expert}."
MOE = (
    Rule(mm=LAYER + "mlp.router.weight", hf=Same(HF + "mlp.gate.weight"),
         shape=("experts", "hidden"), place="text_layer", shard=REPLICATE, when="moe", hold="fp32"),
    Rule(mm=LAYER + "mlp.router.e_score_correction_bias", hf=Same(HF + "mlp.gate.e_score_correction_bias"),
         shape=("experts",), place="text_layer", shard=REPLICATE, when="moe", kind="buffer", hold="fp32", init="zeros"),
    Rule(mm=LAYER + "mlp.experts.gate_up_proj",
         hf=Experts(per_expert=(EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"), stacked_hf=HF + "mlp.experts.gate_up_proj"),
         shape=("experts", "2moe_ffn", "hidden"), place="text_layer", shard=EXPERT_GLU, when="moe"),
    Rule(mm=LAYER + "mlp.experts.down_proj",
         hf=Experts(per_expert=(EXPERT + "down_proj.weight",), stacked_hf=HF + "mlp.experts.down_proj"),
         shape=("experts", "hidden", "moe_ffn"), place="text_layer", shard=EXPERT_ROW, when="moe"),
    Rule(mm=LAYER + "mlp.shared_experts.linear_fc1.weight",
         hf=Concat(HF + "mlp.shared_experts.gate_proj.weight", HF + "mlp.shared_experts.up_proj.weight"),
         shape=("2shared_ffn", "hidden"), place="text_layer", shard=GLU, when="moe"),
    Rule(mm=LAYER + "mlp.shared_experts.linear_fc2.weight", hf=Same(HF + "mlp.shared_experts.down_proj.weight"),
         shape=("hidden", "shared_ffn"), place="text_layer", shard=ROW, when="moe"),
)  # fmt: skip

WEIGHTS = WeightTable(
    model_id="glm4v_moe_lm",
    section="text_decoder",
    mm_prefix="text_decoder.",
    hf_prefixes={"text_decoder": "model.language_model.", "lm_head": "lm_head."},
    sizes=_sizes,
    features=qkv_bias,
    layer_kind=lambda config, layer: "moe" if config.is_moe(layer) else "dense",
    rules=(*EMBEDDING, *ATTENTION, *mlp(), *MOE, *HEAD),
)

CONFIG = ConfigMap(
    model_id="glm4v_moe_lm",
    section="text_decoder",
    hf_section="text_config",
    fields=(
        Field("num_layers", "num_hidden_layers", default=46),
        Field("hidden_size", "hidden_size", default=4096),
        Field("ffn_hidden_size", "intermediate_size", default=10944),
        Field("num_attention_heads", "num_attention_heads", default=96),
        Field("num_query_groups", "num_key_value_heads", default=8),
        Field("kv_channels", "head_dim", default=lambda mm: mm["hidden_size"] // mm["num_attention_heads"]),
        Field("vocab_size", "vocab_size", default=151424),
        Field("max_position_embeddings", "max_position_embeddings", default=65536),
        Field("rope_theta", ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"), default=10000.0),
        Field(
            "partial_rotary_factor",
            ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rope_scaling.partial_rotary_factor"),
            default=0.5,
        ),
        Field("mrope_section", ("rope_parameters.mrope_section", "rope_scaling.mrope_section"), default=[8, 12, 12]),
        Required(
            ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_parameters.type", "rope_scaling.type"),
            ("default",),
        ),
        Field("rms_norm_eps", "rms_norm_eps", default=1e-5),
        Field("activation_func", "hidden_act", default="silu"),
        Field("add_qkv_bias", "attention_bias", default=True),
        TIED,
        Field("num_moe_experts", ("n_routed_experts", "num_local_experts"), default=128),
        Field("first_k_dense_replace", "first_k_dense_replace", default=1),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1408),
        Field("n_shared_experts", "n_shared_experts", default=1),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_router_num_groups", "n_group", default=1),
        Field("moe_router_group_topk", "topk_group", default=1),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
        Field("norm_topk_prob", "norm_topk_prob", default=True),
        INIT,
        *ALWAYS,
    ),
)
