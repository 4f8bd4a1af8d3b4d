"""`qwen2vit`: Qwen2-VL's vision tower. Blocks split by TP; the patch embedding is replicated.

Biases everywhere but in the patch embedding; no learned positions, no final norm; the projector merges patches. Hugging
Face stores attention as one [q; k; v]; here each head's q, k and v stand together, so that a TP slice is whole heads.
"""

from typing import Annotated, ClassVar, Literal

import pydantic
from pydantic import model_validator

from converters.parts import INIT, tower_sizes
from mm_models.config.config_map import ConfigMap, Field, Fixed, Required
from mm_models.config.sections import ANY, Number, Size, VisionEncoderConfig
from mm_models.weights.rules import COLUMN, KV_GROUPS, REPLICATE, ROW, QkvGroups, Rule, Same, WeightTable


class QwenVision(VisionEncoderConfig):
    """`qwen2vit` and `qwen2_5_vit`: LayerNorm and a plain MLP, or RMSNorm and a gated one; windows where both their keys are given."""

    WITHOUT_EFFECT: ClassVar = VisionEncoderConfig.WITHOUT_EFFECT | {
        "intermediate_size": ANY,
        "post_layer_norm": (False,),
    }
    MERGES: ClassVar = False

    add_bias_linear: Literal[True] = True
    gated_linear_unit: bool = False
    activation_func: Literal["quick_gelu", "silu"]
    normalization: Literal["LayerNorm", "RMSNorm"]
    layernorm_epsilon: Number = 1e-6
    window_attn_size: Size | None = None
    """Side of an attention window in pixels; null attends over whole frames in every layer."""
    fullatt_block_indexes: Annotated[list[int], pydantic.Field(default_factory=list)]
    """Layers that attend over whole frames all the same."""
    tokens_per_second: Number | None = None
    """Of videos."""

    @property
    def eps(self) -> float:
        return self.layernorm_epsilon

    @property
    def gated(self) -> bool:
        return self.gated_linear_unit

    @property
    def window_units(self) -> int:
        """Merged tokens along one side of a window."""
        return self.window_attn_size // self.spatial_merge_size // self.patch_size

    def segments(self, layer: int, grid: tuple[int, int, int]) -> list[int]:
        if self.window_attn_size is None or layer in self.fullatt_block_indexes:
            return super().segments(layer, grid)
        side, merge = self.window_units, self.spatial_merge_size
        rows, columns = (
            [min(side, units - at) for at in range(0, units, side)] for units in (grid[1] // merge, grid[2] // merge)
        )
        return [r * c * merge**2 for r in rows for c in columns] * grid[0]

    @model_validator(mode="after")
    def _check_mlp(self):
        expected = "silu" if self.gated else "quick_gelu"
        if self.activation_func != expected:
            kind = "gated" if self.gated else "plain"
            raise ValueError(f"activation_func {self.activation_func!r}: a {kind} MLP is here with {expected!r} alone")
        return self

    @model_validator(mode="after")
    def _check_windows(self):
        if self.window_attn_size is not None and self.window_units < 1:
            raise ValueError(
                f"window_attn_size {self.window_attn_size} is smaller than one merged token, "
                f"{self.patch_size * self.spatial_merge_size} pixels"
            )
        beyond = [layer for layer in self.fullatt_block_indexes if not 0 <= layer < self.num_layers]
        if beyond:
            raise ValueError(f"fullatt_block_indexes names layers {beyond}; the tower has {self.num_layers}")
        return self


def features(config) -> frozenset[str]:
    return frozenset({"glu" if config.gated else "plain", config.normalization})


LAYER, BLOCK = "blocks.layers.{layer}.", "blocks.{layer}."


def norm(mm: str, hf: str) -> tuple[Rule, Rule]:
    """A norm of every block; LayerNorm has a bias."""
    return (
        Rule(mm=LAYER + mm + ".weight", hf=Same(BLOCK + hf + ".weight"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, init="ones"),
        Rule(mm=LAYER + mm + ".bias", hf=Same(BLOCK + hf + ".bias"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, when="LayerNorm", init="zeros"),
    )  # fmt: skip


WEIGHTS = WeightTable(
    model_id="qwen2vit",
    section="vision_encoder",
    mm_prefix="image_encoder.encoder.",
    hf_prefixes={"vision_encoder": "model.visual."},
    sizes=tower_sizes,
    features=features,
    rules=(
        Rule(mm="patch_embed.proj.weight", hf=Same("patch_embed.proj.weight"),
             shape=("hidden", "channels", "frames", "patch", "patch"), place="vision_first", shard=REPLICATE),
        *norm("input_layernorm", "norm1"),
        Rule(mm=LAYER + "self_attention.linear_qkv.weight", hf=QkvGroups(names=(BLOCK + "attn.qkv.weight",)),
             shape=("3hidden", "hidden"), place="vision_layer", shard=KV_GROUPS),
        Rule(mm=LAYER + "self_attention.linear_qkv.bias", hf=QkvGroups(names=(BLOCK + "attn.qkv.bias",)),
             shape=("3hidden",), place="vision_layer", shard=KV_GROUPS, init="zeros"),
        Rule(mm=LAYER + "self_attention.linear_proj.weight", hf=Same(BLOCK + "attn.proj.weight"),
             shape=("hidden", "hidden"), place="vision_layer", shard=ROW),
        Rule(mm=LAYER + "self_attention.linear_proj.bias", hf=Same(BLOCK + "attn.proj.bias"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, init="zeros"),
        *norm("pre_mlp_layernorm", "norm2"),
        Rule(mm=LAYER + "mlp.linear_fc1.weight", hf=Same(BLOCK + "mlp.fc1.weight"),
             shape=("ffn", "hidden"), place="vision_layer", shard=COLUMN, when="plain"),
        Rule(mm=LAYER + "mlp.linear_fc1.bias", hf=Same(BLOCK + "mlp.fc1.bias"),
             shape=("ffn",), place="vision_layer", shard=COLUMN, when="plain", init="zeros"),
        Rule(mm=LAYER + "mlp.linear_fc2.weight", hf=Same(BLOCK + "mlp.fc2.weight"),
             shape=("hidden", "ffn"), place="vision_layer", shard=ROW, when="plain"),
        Rule(mm=LAYER + "mlp.linear_fc2.bias", hf=Same(BLOCK + "mlp.fc2.bias"),
             shape=("hidden",), place="vision_layer", shard=REPLICATE, when="plain", init="zeros"),
    ),
)  # fmt: skip

PATCHES = (
    Field("num_layers", "depth", default=32),
    Field("num_attention_heads", "num_heads", default=16),
    Field("patch_size", "patch_size", default=14),
    Field("temporal_patch_size", "temporal_patch_size", default=2),
    Field("spatial_merge_size", "spatial_merge_size", default=2),
    Field("in_channels", ("in_channels", "in_chans"), default=3),
    INIT,
    Required("rope_parameters.rope_type", ("axial",)),
    Field("rope_theta", "rope_parameters.rope_theta", default=10000.0),
    Fixed("add_bias_linear", True),
    Fixed("layernorm_epsilon", 1e-6),  # the classes' own, without a config field
)
"""Fields of the towers of Qwen2-VL and Qwen2.5-VL alike."""

CONFIG = ConfigMap(
    model_id="qwen2vit",
    section="vision_encoder",
    hf_section="vision_config",
    fields=(
        *PATCHES,
        Field("hidden_size", "embed_dim", default=1280),
        Field("ffn_hidden_size", "mlp_ratio", default=4, scale="hidden_size"),
        Field("activation_func", "hidden_act", default="quick_gelu"),
        Fixed("gated_linear_unit", False),
        Fixed("normalization", "LayerNorm"),
        Fixed("window_attn_size", None),
        Fixed("fullatt_block_indexes", []),
    ),
)
