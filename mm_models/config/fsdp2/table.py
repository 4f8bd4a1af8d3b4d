"""The table of features for a README: what it is called, its key, its default, and its value in one file.

    python -m mm_models.config.fsdp2.table examples/glm4.5v/glm4_5v_106B_config_v1.yaml [en|zh]

Made from the schema and the file, so that no page can say something else.
"""

from __future__ import annotations

import sys
from typing import Any

from mm_models.config import yaml_file
from mm_models.config.fsdp2.run import RunConfig, load_config
from mm_models.config.strict import models_in
from mm_models.errors import UserError

HEADINGS = {"en": ("Feature", "Key", "Default", "In this file"), "zh": ("功能", "配置项", "默认值", "本文件")}
FEATURES = (
    ("FSDP2", "FSDP2", "parallel.fully_shard_parallel_size"),
    ("Grouped experts, EP=1 too", "分组专家矩阵乘（EP=1 亦可用）", "model.use_grouped_expert_matmul"),
    ("Expert parallel", "专家并行", "parallel.expert_parallel_size"),
    ("Fused MoE operators of the NPU", "NPU MoE 融合", "parallel.ep_plan.use_npu_fused_ops"),
    ("Balancing of expert load", "EP 动态负载均衡", "features.enable_ep_balance"),
    ("Ring context parallel", "Ring CP", "parallel.ring_attention_size"),
    ("Ulysses context parallel", "Ulysses CP", "parallel.ulysses_parallel_size"),
    ("Loss in chunks of fixed size", "静态分块 loss", "features.enable_chunk_loss"),
    ("Loss in chunks of a fixed total", "动态分块 loss", "features.enable_dynamic_chunk_loss"),
    ("Recompute", "重计算", "features.recompute"),
    ("Asynchronous activation offload", "异步激活卸载", "features.enable_activation_offload"),
    ("Deterministic computing", "确定性计算", "training.use_deter_comp"),
)
"""English and Chinese name, key."""


def feature_table(config: RunConfig, language: str = "en") -> str:
    """The table in Markdown."""
    if language not in HEADINGS:
        raise UserError(f"language {language!r} is not known. Known: {', '.join(HEADINGS)}.")
    rows = [HEADINGS[language], ("---",) * 4]
    for english, chinese, key in FEATURES:
        values = [f"`{_word(value)}`" for value in (_default(key), _value(config, key))]
        rows.append((english if language == "en" else chinese, f"`{key}`", *values))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _default(key: str) -> Any:
    schema: type = RunConfig
    *sections, last = key.split(".")
    for section in sections:
        (schema,) = models_in(schema.model_fields[section].annotation)
    return schema.model_fields[last].default


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _word(value: Any) -> str:
    return yaml_file.dump(value).removesuffix("...\n").strip()


if __name__ == "__main__":
    sys.stdout.write(feature_table(load_config(sys.argv[1]), *sys.argv[2:]))
