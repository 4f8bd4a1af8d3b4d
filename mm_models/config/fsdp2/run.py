"""`RunConfig`, read from YAML with dotted overrides and written back whole.

An override is `section.key=value`; the value is YAML (`training.lr=1e-4`, `training.load=null`, `model.freeze=["model.visual.*"]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mm_models.config import yaml_file
from mm_models.config.data import DataConfig
from mm_models.config.fsdp2.features import Features
from mm_models.config.fsdp2.model import Model
from mm_models.config.fsdp2.parallel import Parallel
from mm_models.config.fsdp2.tools import Tools
from mm_models.config.fsdp2.training import Training
from mm_models.config.strict import StrictModel, check_key, validate
from mm_models.errors import UserError

ELSEWHERE = {"use_npu_fused_moe": "parallel.ep_plan.use_npu_fused_ops"}
"""Keys of other files that mean something here under another name."""


class RunConfig(StrictModel):
    """The whole file."""

    parallel: Parallel = Parallel()
    data: DataConfig
    model: Model
    features: Features = Features()
    training: Training
    tools: Tools = Tools()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, put the overrides into it and check the result. Everything wrong is a `UserError` naming file, key and value."""
    content = yaml_file.load(path)
    if overrides:
        _override(content, overrides)
    for place in _places(content):
        key = place.rsplit(".", 1)[-1]
        if key in ELSEWHERE:
            raise UserError(f"{path}: {place}: this switch is called {ELSEWHERE[key]} here; move it.")
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return validate(RunConfig, content, where)


def resolved(config: RunConfig) -> str:
    """The configuration with every default, as YAML that `load_config` reads back as an equal one."""
    return yaml_file.dump(config.model_dump())


def _override(content: dict[str, Any], overrides: Sequence[str]) -> None:
    seen: set[str] = set()
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"command line: got {word!r}, expected section.key=value such as training.lr=1e-4.")
        check_key(RunConfig, key, "command line")
        if key in seen:
            raise UserError(f"command line: {key} is given twice; keep one.")
        seen.add(key)
        _put(content, key, _parse(key, text))


def _parse(key: str, text: str) -> Any:
    try:
        return yaml_file.parse(text, f"command line, {key}")
    except UserError as error:
        quote = " A pattern in a list needs quotes: ['model.layers.{*}']." if "{" in text or "*" in text else ""
        raise UserError(f"{error}{quote}") from error


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, name in enumerate(parents):
        inner = content.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(
                f"command line: {key} cannot be set, the file has {inner!r} at {'.'.join(parents[: depth + 1])}."
            )
        content = inner
    content[last] = value


def _places(content: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the file."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from _places(value, f"{prefix}{key}.")
