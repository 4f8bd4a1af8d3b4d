"""`glm4v_vit`: the GLM vision tower. Blocks split by TP; everything around them is replicated.

Attention keeps Hugging Face's one [q; k; v], as the field's checkpoints of this tower do; a TP rank has its heads of each third.
"""

from typing import ClassVar, Literal

from converters.parts import INIT, NO_DROPOUT, tower_sizes
from mm_models.config.config_map import ConfigMap, Field, Fixed, Required
from mm_models.config.sections import ANY, Number, Size, VisionEncoderConfig
from mm_models.weights.rules import GLU, QKV_PARTS, REPLICATE, ROW, Concat, Rule, Same, WeightTable


class GlmVision(VisionEncoderConfig):
    """`glm4v_vit`: merges patches itself, `out_hidden_size` features per merged token out."""

    WITHOUT_EFFECT: ClassVar = VisionEncoderConfig.WITHOUT_EFFECT | {
        "layernorm_epsilon": ANY,
        "post_layer_norm": ANY,
        "tokens_per_second": ANY,
        "window_attn_size": ANY,
    }
    MERGES: ClassVar = True

    out_hidden_size: Size
    image_size: Size
    attention_bias: Literal[False] = False
    add_bias_linear: Literal[False] = False
    gated_linear_unit: Literal[True] = True
    activation_func: Literal["silu"] = "silu"
    normalization: Literal["RMSNorm"] = "RMSNorm"
    rms_norm_eps: Number = 1e-5

    @property
    def eps(self) -> float:
        return self.rms_norm_eps

    @property
    def gated(self) -> bool:
        return True

    @property
    def merging_products(self) -> int:
        return self.hidden_size * self.out_hidden_size


def _sizes(config) -> dict[str, int]:
    return tower_sizes(config) | {
        "out": config.out_hidden_size,
        "merge": config.spatial_merge_size,
        "positions": (config.image_size // config.patch_size) ** 2,
    }


LAYER, BLOCK = "blocks.layers.{layer}.", "blocks.{layer}."

WEIGHTS = WeightTable(
    model_id="glm4v_vit",
    section="vision_encoder",
    mm_prefix="image_encoder.encoder.",
    hf_prefixes={"vision_encoder": "model.visual."},
    sizes=_sizes,
    rules=(
        Rule(mm="patch_embed.proj.weight", hf=Same("patch_embed.proj.weight"),
             shape=("hidden", "channels", "frames", "patch", "patch"), place="vision_first", shard=REPLICATE),
        Rule(mm="patch_embed.proj.bias", hf=Same("patch_embed.proj.bias"),
             shape=("hidden",), place="vision_first", shard=REPLICATE, init="zeros"),
        Rule(mm="post_conv_layernorm.weight", hf=Same("post_conv_layernorm.weight"),
             shape=("hidden",), place="vision_first", shard=REPLICATE, init="ones"),
        Rule(mm="embeddings.position_embedding.weight", hf=Same("embeddings.position_embedding.weight"),
             shape=("positions", "hidden"), place="vision_first", shard=REPLICATE),
        Rule(mm=LAYER + "input_layernorm.weight", hf=Same(BLOCK + "norm1.weight"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, init="ones"),
        Rule(mm=LAYER + "self_attention.qkv.weight", hf=Same(BLOCK + "attn.qkv.weight"),
             shape=("3hidden", "hidden"), place="vision_layer", shard=QKV_PARTS),
        Rule(mm=LAYER + "self_attention.proj.weight", hf=Same(BLOCK + "attn.proj.weight"),
             shape=("hidden", "hidden"), place="vision_layer", shard=ROW),
        Rule(mm=LAYER + "pre_mlp_layernorm.weight", hf=Same(BLOCK + "norm2.weight"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, init="ones"),
        Rule(mm=LAYER + "mlp.linear_fc1.weight", hf=Concat(BLOCK + "mlp.gate_proj.weight", BLOCK + "mlp.up_proj.weight"),
             shape=("2ffn", "hidden"), place="vision_layer", shard=GLU),
        Rule(mm=LAYER + "mlp.linear_fc2.weight", hf=Same(BLOCK + "mlp.down_proj.weight"),
             shape=("hidden", "ffn"), place="vision_layer", shard=ROW),
        Rule(mm="blocks.final_layernorm.weight", hf=Same("post_layernorm.weight"),
             shape=("hidden",), place="vision_last", shard=REPLICATE, init="ones"),
        Rule(mm="downsample.weight", hf=Same("downsample.weight"),
             shape=("out", "hidden", "merge", "merge"), place="vision_last", shard=REPLICATE),
        Rule(mm="downsample.bias", hf=Same("downsample.bias"),
             shape=("out",), place="vision_last", shard=REPLICATE, init="zeros"),
    ),
)  # fmt: skip

CONFIG = ConfigMap(
    model_id="glm4v_vit",
    section="vision_encoder",
    hf_section="vision_config",
    fields=(
        Field("num_layers", "depth", default=24),
        Field("hidden_size", "hidden_size", default=1536),
        Field("num_attention_heads", "num_heads", default=12),
        # The blocks' MLP is as wide as the tower's output; `intermediate_size` is the merger's width.
        Field("ffn_hidden_size", "out_hidden_size", default=4096),
        Field("out_hidden_size", "out_hidden_size", default=4096),
        Field("image_size", "image_size", default=336),
        Field("patch_size", "patch_size", default=14),
        Field("temporal_patch_size", "temporal_patch_size", default=2),
        Field("spatial_merge_size", "spatial_merge_size", default=2),
        Field("in_channels", "in_channels", default=3),
        Field("attention_bias", "attention_bias", default=False),
        NO_DROPOUT,
        Field("activation_func", "hidden_act", default="silu"),
        Field("rms_norm_eps", "rms_norm_eps", default=1e-5),
        INIT,
        Required("rope_parameters.rope_type", ("axial",)),
        Field("rope_theta", "rope_parameters.rope_theta", default=10000.0),
        Fixed("gated_linear_unit", True),
        Fixed("add_bias_linear", False),
        Fixed("normalization", "RMSNorm"),
    ),
)
