"""`glm4v_moe_lm`: the GLM-4.5 decoder, a few dense layers and then mixtures of experts.

Head dimension is explicit (128 at hidden 4096 and 96 heads: not hidden / heads). q, k and v carry biases, the output
projection does not. The router weight and its correction bias, a persistent buffer, are held in fp32.
"""

from mm_models.config.config_map import ConfigMap, Field, Fixed, Required
from mm_models.weights.rules import (
    COLUMN,
    EXPERT_GLU,
    EXPERT_ROW,
    GLU,
    KV_GROUPS,
    REPLICATE,
    ROW,
    Concat,
    Experts,
    QkvGroups,
    Rule,
    Same,
    WeightTable,
)  # fmt: skip


def _sizes(config) -> dict[str, int]:
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    sizes = {
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "heads": heads,
        "groups": groups,
        "head_dim": dim,
        "q": heads * dim,
        "qkv": (heads + 2 * groups) * dim,
        "ffn": config.ffn_hidden_size,
        "2ffn": 2 * config.ffn_hidden_size,
    }
    if config.num_moe_experts:
        sizes |= {
            "experts": config.num_moe_experts,
            "moe_ffn": config.moe_ffn_hidden_size,
            "2moe_ffn": 2 * config.moe_ffn_hidden_size,
            "shared_ffn": config.shared_ffn_hidden_size,
            "2shared_ffn": 2 * config.shared_ffn_hidden_size,
        }
    return sizes


LAYER, HF = "decoder.layers.{layer}.", "layers.{layer}."
EXPERT = HF + "mlp.experts.{expert}."

WEIGHTS = WeightTable(
    model_id="glm4v_moe_lm",
    section="text_decoder",
    mm_prefix="text_decoder.",
    hf_prefixes={"text_decoder": "model.language_model.", "lm_head": "lm_head."},
    sizes=_sizes,
    features=lambda config: frozenset({"qkv_bias"} if config.add_qkv_bias else ()),
    layer_kind=lambda config, layer: "moe" if config.is_moe(layer) else "dense",
    rules=(
        Rule(mm="embedding.word_embeddings.weight", hf=Same("embed_tokens.weight"),
             shape=("vocab", "hidden"), place="text_first", shard=COLUMN),
        Rule(mm=LAYER + "input_layernorm.weight", hf=Same(HF + "input_layernorm.weight"),
             shape=("hidden",), place="text_layer", shard=REPLICATE, init="ones"),
        Rule(mm=LAYER + "self_attention.linear_qkv.weight",
             hf=QkvGroups(names=tuple(HF + f"self_attn.{part}_proj.weight" for part in "qkv")),
             shape=("qkv", "hidden"), place="text_layer", shard=KV_GROUPS),
        Rule(mm=LAYER + "self_attention.linear_qkv.bias",
             hf=QkvGroups(names=tuple(HF + f"self_attn.{part}_proj.bias" for part in "qkv")),
             shape=("qkv",), place="text_layer", shard=KV_GROUPS, when="qkv_bias", init="zeros"),
        Rule(mm=LAYER + "self_attention.linear_proj.weight", hf=Same(HF + "self_attn.o_proj.weight"),
             shape=("hidden", "q"), place="text_layer", shard=ROW),
        Rule(mm=LAYER + "pre_mlp_layernorm.weight", hf=Same(HF + "post_attention_layernorm.weight"),
             shape=("hidden",), place="text_layer", shard=REPLICATE, init="ones"),
        Rule(mm=LAYER + "mlp.linear_fc1.weight", hf=Concat(HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"),
             shape=("2ffn", "hidden"), place="text_layer", shard=GLU, when="dense"),
        Rule(mm=LAYER + "mlp.linear_fc2.weight", hf=Same(HF + "mlp.down_proj.weight"),
             shape=("hidden", "ffn"), place="text_layer", shard=ROW, when="dense"),
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
        Rule(mm="decoder.final_layernorm.weight", hf=Same("norm.weight"),
             shape=("hidden",), place="text_last", shard=REPLICATE, init="ones"),
        Rule(mm="output_layer.weight", hf=Same("weight"), part="lm_head",
             shape=("vocab", "hidden"), place="text_last", shard=COLUMN, when="untied"),
        Rule(mm="output_layer.weight", hf=None, alias="embedding.word_embeddings.weight", part="lm_head",
             shape=("vocab", "hidden"), place="text_last", shard=COLUMN, when="tied"),
    ),
)  # fmt: skip

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
        Field("rope_theta", ("rope_parameters.rope_theta", "rope_theta"), default=10000.0),
        Field("partial_rotary_factor", ("rope_parameters.partial_rotary_factor", "partial_rotary_factor"), default=0.5),
        Field("mrope_section", ("rope_parameters.mrope_section", "rope_scaling.mrope_section"), default=[8, 12, 12]),
        Required(("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type"), ("default",)),
        Field("rms_norm_eps", "rms_norm_eps", default=1e-5),
        Field("activation_func", "hidden_act", default="silu"),
        Field("add_qkv_bias", "attention_bias", default=True),
        # transformers 4.57 keeps the flag in text_config, 5.x at the root, where it forwards an older text_config's.
        Field(
            "untie_embeddings_and_output_weights",
            ("/tie_word_embeddings", "tie_word_embeddings"),
            default=True,
            negate=True,
            any_true=True,
        ),
        Field("num_moe_experts", ("n_routed_experts", "num_local_experts"), default=128),
        Field("first_k_dense_replace", "first_k_dense_replace", default=1),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1408),
        Field("n_shared_experts", "n_shared_experts", default=1),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_router_num_groups", "n_group", default=1),
        Field("moe_router_group_topk", "topk_group", default=1),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
        Field("norm_topk_prob", "norm_topk_prob", default=True),
        Field("init_method_std", "initializer_range", default=0.02),
        Fixed("position_embedding_type", "mrope"),
        Fixed("gated_linear_unit", True),
        Fixed("add_bias_linear", False),
        Fixed("normalization", "RMSNorm"),
    ),
)
