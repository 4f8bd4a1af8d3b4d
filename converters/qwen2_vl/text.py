"""`qwen2lm` and `qwen2_5_lm`: the Qwen2 decoder, dense, with M-RoPE over the whole head.

q, k and v always carry biases, the output projection never does; the head dimension is hidden / heads.
"""

from typing import ClassVar, Literal

from converters.parts import ALWAYS, ATTENTION, EMBEDDING, HEAD, INIT, TIED, decoder_sizes, mlp, qkv_bias
from mm_models.config.config_map import ConfigMap, Field, Fixed, Required
from mm_models.config.sections import Number, TextDecoderConfig, head_dim
from mm_models.weights.rules import WeightTable


class QwenText(TextDecoderConfig):
    DEFAULTS: ClassVar = {"kv_channels": head_dim}

    layernorm_epsilon: Number
    add_qkv_bias: Literal[True]
    partial_rotary_factor: Literal[1.0] = 1.0

    @property
    def eps(self) -> float:
        return self.layernorm_epsilon


WEIGHTS = WeightTable(
    model_id="qwen2lm",
    section="text_decoder",
    mm_prefix="text_decoder.",
    hf_prefixes={"text_decoder": "model.language_model.", "lm_head": "lm_head."},
    sizes=decoder_sizes,
    features=qkv_bias,
    rules=(*EMBEDDING, *ATTENTION, *mlp(), *HEAD),
)

CONFIG = ConfigMap(
    model_id="qwen2lm",
    section="text_decoder",
    hf_section="text_config",
    fields=(
        Field("num_layers", "num_hidden_layers", default=80),
        Field("hidden_size", "hidden_size", default=8192),
        Field("ffn_hidden_size", "intermediate_size", default=29568),
        Field("num_attention_heads", "num_attention_heads", default=64),
        Field("num_query_groups", "num_key_value_heads", default=8, null="num_attention_heads"),
        Fixed("kv_channels", head_dim),
        Field("vocab_size", "vocab_size", default=152064),
        Field("max_position_embeddings", "max_position_embeddings", default=32768, compared=False),
        Field("rope_theta", ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"), default=1000000.0),
        Field("mrope_section", ("rope_parameters.mrope_section", "rope_scaling.mrope_section"), default=[16, 24, 24]),
        Required(
            ("rope_parameters.rope_type", "rope_scaling.rope_type", "rope_parameters.type", "rope_scaling.type"),
            ("default", "mrope"),
        ),
        Field("layernorm_epsilon", "rms_norm_eps", default=1e-5),
        Field("activation_func", "hidden_act", default="silu"),
        Required("use_sliding_window", (False,)),
        Required("layer_types", ("full_attention",), each=True),
        TIED,
        INIT,
        Fixed("add_qkv_bias", True),
        *ALWAYS,
    ),
)
