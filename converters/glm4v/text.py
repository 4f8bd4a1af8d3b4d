"""`glm4v_lm`: the GLM-4 decoder, dense. Norms stand before and after attention and MLP; gate and up are one tensor already."""

from typing import ClassVar, Literal

from converters.parts import ALWAYS, ATTENTION, EMBEDDING, HEAD, HF, INIT, TIED, decoder_sizes, mlp, norm, qkv_bias
from mm_models.config.config_map import ConfigMap, Field, Fixed, Required
from mm_models.config.sections import ANY, Number, TextDecoderConfig, head_dim
from mm_models.weights.rules import Same, WeightTable


class GlmText(TextDecoderConfig):
    WITHOUT_EFFECT: ClassVar = TextDecoderConfig.WITHOUT_EFFECT | {"layernorm_epsilon": ANY}
    DEFAULTS: ClassVar = {"kv_channels": head_dim}

    rms_norm_eps: Number
    add_qkv_bias: Literal[True]

    @property
    def eps(self) -> float:
        return self.rms_norm_eps

    @property
    def rotary_interleaved(self) -> bool:
        return True


WEIGHTS = WeightTable(
    model_id="glm4v_lm",
    section="text_decoder",
    mm_prefix="text_decoder.",
    hf_prefixes={"text_decoder": "model.language_model.", "lm_head": "lm_head."},
    sizes=decoder_sizes,
    features=qkv_bias,
    rules=(
        *EMBEDDING,
        *ATTENTION,
        norm("post_self_attn_layernorm", "post_self_attn_layernorm"),
        *mlp(Same(HF + "mlp.gate_up_proj.weight")),
        norm("post_mlp_layernorm", "post_mlp_layernorm"),
        *HEAD,
    ),
)

CONFIG = ConfigMap(
    model_id="glm4v_lm",
    section="text_decoder",
    hf_section="text_config",
    fields=(
        Field("num_layers", "num_hidden_layers", default=40),
        Field("hidden_size", "hidden_size", default=4096),
        Field("ffn_hidden_size", "intermediate_size", default=13696),
        Field("num_attention_heads", "num_attention_heads", default=32),
        Field("num_query_groups", "num_key_value_heads", default=2, null="num_attention_heads"),
        Fixed("kv_channels", head_dim),
        Field("vocab_size", "vocab_size", default=151552),
        Field("max_position_embeddings", "max_position_embeddings", default=32768, compared=False),
        Field("rope_theta", ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"), default=10000.0),
        Field(
            "partial_rotary_factor",
            ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rope_scaling.partial_rotary_factor"),
            default=1.0,
        ),
        Field("mrope_section", ("rope_parameters.mrope_section", "rope_scaling.mrope_section"), default=[8, 12, 12]),
        Required(
            ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_parameters.type", "rope_scaling.type"),
            ("default",),
        ),
        Field("rms_norm_eps", "rms_norm_eps", default=1e-5),
        Field("activation_func", "hidden_act", default="silu"),
        Required("attention_bias", (True,)),  # the class has biases on q, k and v whatever the key says
        TIED,
        INIT,
        Fixed("add_qkv_bias", True),
        *ALWAYS,
    ),
)
