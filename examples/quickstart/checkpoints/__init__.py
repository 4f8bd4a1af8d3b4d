"""The quickstart's small models, one `Family` each: real architectures and formats, random weights, made offline."""

from checkpoints.family import Family
from checkpoints.glm import GLM4V, GLM4V_MOE
from checkpoints.qwen import QWEN2_5_VL, QWEN2_VL

FAMILIES: dict[str, Family] = {
    "glm4v_moe": GLM4V_MOE,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "glm4v": GLM4V,
}
"""By Hugging Face's `model_type`."""
