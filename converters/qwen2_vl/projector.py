"""`lnmlp`: norm per patch, then merged patches through two linears with an exact GELU between; split over TP.

With LayerNorm it is Qwen2-VL's patch merger, with RMSNorm Qwen2.5-VL's.
"""

from typing import Literal

from converters.parts import INIT
from mm_models.config.config_map import ConfigMap, Derived, Field, Fixed
from mm_models.config.sections import Number, Size, VisionEncoderConfig, VisionProjectorConfig
from mm_models.weights.rules import COLUMN, REPLICATE, ROW, Rule, Same, WeightTable


class LnMlp(VisionProjectorConfig):
    """`input_size` features a patch, `ffn_hidden_size` a merged token, `hidden_size` out."""

    input_size: Size
    ffn_hidden_size: Size
    hidden_size: Size
    activation_func: Literal["gelu"] = "gelu"
    normalization: Literal["LayerNorm", "RMSNorm"]
    layernorm_epsilon: Number = 1e-6
    add_bias_linear: Literal[True] = True
    gated_linear_unit: Literal[False] = False

    @property
    def out_features(self) -> int:
        return self.hidden_size

    @property
    def products(self) -> int:
        return self.ffn_hidden_size * (self.ffn_hidden_size + self.hidden_size)

    @property
    def split_widths(self) -> dict[str, int]:
        return {"ffn_hidden_size": self.ffn_hidden_size}

    def check_encoder(self, encoder: VisionEncoderConfig) -> None:
        if encoder.MERGES:
            raise ValueError(f"lnmlp takes patches, {encoder.model_id} gives merged tokens; GlmMLP takes them")
        merged = encoder.hidden_size * encoder.spatial_merge_size**2
        if (self.input_size, self.ffn_hidden_size) != (encoder.hidden_size, merged):
            raise ValueError(
                f"vision_projector: input_size {self.input_size} and ffn_hidden_size {self.ffn_hidden_size}, expected the "
                f"encoder's hidden_size {encoder.hidden_size} and that x spatial_merge_size {encoder.spatial_merge_size}² = {merged}"
            )


def _sizes(config) -> dict[str, int]:
    return {"in": config.input_size, "ffn": config.ffn_hidden_size, "out": config.hidden_size}


WEIGHTS = WeightTable(
    model_id="lnmlp",
    section="vision_projector",
    mm_prefix="image_encoder.projector.",
    hf_prefixes={"vision_projector": "model.visual.merger."},
    sizes=_sizes,
    features=lambda config: frozenset({config.normalization}),
    rules=(
        Rule(mm="layernorm.weight", hf=Same("ln_q.weight"),
             shape=("in",), place="vision_last", shard=REPLICATE, init="ones"),
        Rule(mm="layernorm.bias", hf=Same("ln_q.bias"),
             shape=("in",), place="vision_last", shard=REPLICATE, when="LayerNorm", init="zeros"),
        Rule(mm="encoder.linear_fc1.weight", hf=Same("mlp.0.weight"),
             shape=("ffn", "ffn"), place="vision_last", shard=COLUMN),
        Rule(mm="encoder.linear_fc1.bias", hf=Same("mlp.0.bias"),
             shape=("ffn",), place="vision_last", shard=COLUMN, init="zeros"),
        Rule(mm="encoder.linear_fc2.weight", hf=Same("mlp.2.weight"),
             shape=("out", "ffn"), place="vision_last", shard=ROW),
        Rule(mm="encoder.linear_fc2.bias", hf=Same("mlp.2.bias"),
             shape=("out",), place="vision_last", shard=REPLICATE, init="zeros"),
    ),
)  # fmt: skip


def config_map(width: str, out: str, normalization: str, *, default: int) -> ConfigMap:
    """`width` and `out` are what the family's vision_config calls the tower's width (absent: `default`) and the output's."""
    return ConfigMap(
        model_id="lnmlp",
        section="vision_projector",
        hf_section="vision_config",
        fields=(
            Field("input_size", width, default=default),
            Derived(
                "ffn_hidden_size", {width: default, "spatial_merge_size": 2}, lambda hidden, merge: hidden * merge**2
            ),
            Field("hidden_size", out, default=3584),
            INIT,
            Fixed("normalization", normalization),
            Fixed("layernorm_epsilon", 1e-6),
            Fixed("activation_func", "gelu"),
            Fixed("add_bias_linear", True),
            Fixed("gated_linear_unit", False),
        ),
    )


CONFIG = config_map("embed_dim", "hidden_size", "LayerNorm", default=1280)
