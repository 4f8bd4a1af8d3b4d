"""`GlmMLP`: the merger between tower and decoder. Small beside both, so it is replicated over TP."""

from mm_models.config.config_map import ConfigMap, Field, Fixed
from mm_models.weights.rules import REPLICATE, Rule, Same, WeightTable


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
        Field("init_method_std", "initializer_range", default=0.02),
        Fixed("layernorm_epsilon", 1e-5),  # the class's own nn.LayerNorm default; no config field
    ),
)
