"""`GlmMLP`: the merger between tower and decoder. Small beside both, so it is replicated over TP."""

from typing import ClassVar, Literal

from converters.parts import INIT
from mm_models.config.config_map import ConfigMap, Field
from mm_models.config.sections import ANY, Size, VisionEncoderConfig, VisionProjectorConfig
from mm_models.weights.rules import REPLICATE, Rule, Same, WeightTable


class GlmProjector(VisionProjectorConfig):
    """`GlmMLP`: `out_hidden_size` features in and out. Its LayerNorm has torch's own epsilon, 1e-5."""

    WITHOUT_EFFECT: ClassVar = VisionProjectorConfig.WITHOUT_EFFECT | dict.fromkeys(
        ("input_size", "hidden_size", "ffn_hidden_size", "normalization", "layernorm_epsilon", "gated_linear_unit",
         "add_bias_linear"), ANY,
    )  # fmt: skip

    out_hidden_size: Size
    intermediate_size: Size
    hidden_act: Literal["silu"] = "silu"

    @property
    def out_features(self) -> int:
        return self.out_hidden_size

    @property
    def products(self) -> int:
        return self.out_hidden_size**2 + 3 * self.out_hidden_size * self.intermediate_size

    def check_encoder(self, encoder: VisionEncoderConfig) -> None:
        if not encoder.MERGES:
            raise ValueError(f"GlmMLP takes merged tokens, {encoder.model_id} gives patches; lnmlp merges them")
        if encoder.out_hidden_size != self.out_hidden_size:
            raise ValueError(
                f"out_hidden_size: vision_encoder {encoder.out_hidden_size}, vision_projector {self.out_hidden_size}"
            )


def _sizes(config) -> dict[str, int]:
    return {"out": config.out_hidden_size, "inner": config.intermediate_size}


def _same(name: str, shape: tuple[str, ...], init: str = "normal") -> Rule:
    return Rule(mm=name, hf=Same(name), shape=shape, place="vision_last", shard=REPLICATE, init=init)


WEIGHTS = WeightTable(
    model_id="GlmMLP",
    section="vision_projector",
    mm_prefix="image_encoder.projector.",
    hf_prefixes={"vision_projector": "model.visual.merger."},
    sizes=_sizes,
    rules=(
        _same("proj.weight", ("out", "out")),
        _same("post_projection_norm.weight", ("out",), init="ones"),
        _same("post_projection_norm.bias", ("out",), init="zeros"),
        _same("gate_proj.weight", ("inner", "out")),
        _same("up_proj.weight", ("inner", "out")),
        _same("down_proj.weight", ("out", "inner")),
    ),
)

CONFIG = ConfigMap(
    model_id="GlmMLP",
    section="vision_projector",
    hf_section="vision_config",
    fields=(
        Field("out_hidden_size", "out_hidden_size", default=4096),
        Field("intermediate_size", "intermediate_size", default=13696),
        Field("hidden_act", "hidden_act", default="silu"),
        INIT,
    ),
)
