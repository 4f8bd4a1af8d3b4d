"""`qwen2vit` with a gated MLP: Qwen2-VL's weight map plus gate/up rules, and Qwen2.5-VL's config fields.

`WEIGHTS` serves both families: which MLP and which norm a model has, its model.json says.
"""

from dataclasses import replace

from converters.qwen2_vl import vision as qwen2_vl
from converters.qwen2_vl.vision import BLOCK, LAYER, PATCHES
from mm_models.config.config_map import ConfigMap, Field, Fixed
from mm_models.weights.rules import GLU, REPLICATE, ROW, Concat, Rule, Same

GATED_MLP = (
    Rule(mm=LAYER + "mlp.linear_fc1.weight", hf=Concat(BLOCK + "mlp.gate_proj.weight", BLOCK + "mlp.up_proj.weight"),
         shape=("2ffn", "hidden"), place="vision_layer", shard=GLU, when="glu"),
    Rule(mm=LAYER + "mlp.linear_fc1.bias", hf=Concat(BLOCK + "mlp.gate_proj.bias", BLOCK + "mlp.up_proj.bias"),
         shape=("2ffn",), place="vision_layer", shard=GLU, when="glu", init="zeros"),
    Rule(mm=LAYER + "mlp.linear_fc2.weight", hf=Same(BLOCK + "mlp.down_proj.weight"),
         shape=("hidden", "ffn"), place="vision_layer", shard=ROW, when="glu"),
    Rule(mm=LAYER + "mlp.linear_fc2.bias", hf=Same(BLOCK + "mlp.down_proj.bias"),
         shape=("hidden",), place="vision_layer", shard=REPLICATE, when="glu", init="zeros"),
)  # fmt: skip

WEIGHTS = replace(qwen2_vl.WEIGHTS, rules=(*qwen2_vl.WEIGHTS.rules, *GATED_MLP))

CONFIG = ConfigMap(
    model_id="qwen2vit",
    section="vision_encoder",
    hf_section="vision_config",
    fields=(
        *PATCHES,
        Field("hidden_size", "hidden_size", default=3584),
        Field("ffn_hidden_size", "intermediate_size", default=3420),
        Field("activation_func", "hidden_act", default="silu"),
        Field("window_attn_size", "window_size", default=112),
        Field("fullatt_block_indexes", "fullatt_block_indexes", default=[7, 15, 23, 31]),
        Field("tokens_per_second", "tokens_per_second", default=4),
        Fixed("gated_linear_unit", True),
        Fixed("normalization", "RMSNorm"),
    ),
)
