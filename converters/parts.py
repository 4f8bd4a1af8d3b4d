"""What families have in common: named sizes of towers and decoders, a decoder's rules for embedding, attention, dense MLP, final norm
and head, and some config fields.
"""

from mm_models.config.config_map import Field, Fixed, Required
from mm_models.weights.rules import (
    COLUMN,
    GLU,
    KV_GROUPS,
    REPLICATE,
    ROW,
    Concat,
    QkvGroups,
    Rule,
    Same,
    Transform,
)  # fmt: skip

LAYER, HF = "decoder.layers.{layer}.", "layers.{layer}."


def decoder_sizes(config) -> dict[str, int]:
    """Named sizes of the rules here, from a decoder's section of model.json."""
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    return {
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


def tower_sizes(config) -> dict[str, int]:
    """The same of a vision tower, from its section."""
    return {
        "hidden": config.hidden_size,
        "3hidden": 3 * config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "2ffn": 2 * config.ffn_hidden_size,
        "heads": config.num_attention_heads,
        "groups": config.num_attention_heads,
        "head_dim": config.head_dim,
        "channels": config.in_channels,
        "frames": config.temporal_patch_size,
        "patch": config.patch_size,
    }


def qkv_bias(config) -> frozenset[str]:
    """The feature that the bias rule of attention asks for."""
    return frozenset({"qkv_bias"} if config.add_qkv_bias else ())


def norm(mm: str, hf: str) -> Rule:
    """A norm of every layer."""
    return Rule(mm=LAYER + mm + ".weight", hf=Same(HF + hf + ".weight"),
                shape=("hidden",), place="text_layer", shard=REPLICATE, init="ones")  # fmt: skip


EMBEDDING = (
    Rule(mm="embedding.word_embeddings.weight", hf=Same("embed_tokens.weight"),
         shape=("vocab", "hidden"), place="text_first", shard=COLUMN),
)  # fmt: skip

ATTENTION = (
    norm("input_layernorm", "input_layernorm"),
    Rule(mm=LAYER + "self_attention.linear_qkv.weight",
         hf=QkvGroups(names=tuple(HF + f"self_attn.{part}_proj.weight" for part in "qkv")),
         shape=("qkv", "hidden"), place="text_layer", shard=KV_GROUPS),
    Rule(mm=LAYER + "self_attention.linear_qkv.bias",
         hf=QkvGroups(names=tuple(HF + f"self_attn.{part}_proj.bias" for part in "qkv")),
         shape=("qkv",), place="text_layer", shard=KV_GROUPS, when="qkv_bias", init="zeros"),
    Rule(mm=LAYER + "self_attention.linear_proj.weight", hf=Same(HF + "self_attn.o_proj.weight"),
         shape=("hidden", "q"), place="text_layer", shard=ROW),
    norm("pre_mlp_layernorm", "post_attention_layernorm"),
)  # fmt: skip


GATE_UP = Concat(HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight")


def mlp(gate_up: Transform = GATE_UP) -> tuple[Rule, ...]:
    """A dense gated MLP; `gate_up` is what Hugging Face's gate and up projections are called."""
    return (
        Rule(mm=LAYER + "mlp.linear_fc1.weight", hf=gate_up,
             shape=("2ffn", "hidden"), place="text_layer", shard=GLU, when="dense"),
        Rule(mm=LAYER + "mlp.linear_fc2.weight", hf=Same(HF + "mlp.down_proj.weight"),
             shape=("hidden", "ffn"), place="text_layer", shard=ROW, when="dense"),
    )  # fmt: skip


HEAD = (
    Rule(mm="decoder.final_layernorm.weight", hf=Same("norm.weight"),
         shape=("hidden",), place="text_last", shard=REPLICATE, init="ones"),
    Rule(mm="output_layer.weight", hf=Same("weight"), part="lm_head",
         shape=("vocab", "hidden"), place="text_last", shard=COLUMN, when="untied"),
    Rule(mm="output_layer.weight", hf=Same("weight"), alias="embedding.word_embeddings.weight", part="lm_head",
         shape=("vocab", "hidden"), place="text_last", shard=COLUMN, when="tied"),
)  # fmt: skip

INIT = Field("init_method_std", "initializer_range", default=0.02, compared=False)
"""Of a draw from scratch; published weights owe nothing to it."""

TIED = Field(
    "untie_embeddings_and_output_weights",
    ("/tie_word_embeddings", "tie_word_embeddings"),
    default=True,
    negate=True,
    any_true=True,
)
"""transformers 4.57 keeps the flag in text_config, 5.x at the root, where it forwards an older text_config's."""

NO_DROPOUT = Required("attention_dropout", (0.0,))
"""No kernel here drops attention."""

ALWAYS = (
    NO_DROPOUT,
    Fixed("position_embedding_type", "mrope"),
    Fixed("gated_linear_unit", True),
    Fixed("add_bias_linear", False),
    Fixed("normalization", "RMSNorm"),
)
