"""What an optimizer state says beside its moments: the step and the options of each parameter group, joined over all files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mm_models.errors import UserError
from mm_models.weights import ptfile
from mm_models.weights.manifest import Checkpoint
from mm_models.weights.model_map import build
from mm_models.weights.output import OptimizerHead


def read_head(checkpoint: Checkpoint, say: Callable[[str], None]) -> OptimizerHead | None:
    """The head of a checkpoint's optimizer state; None when it has none. Files that disagree about the step are refused."""
    moments = checkpoint.manifest.optimizer
    if not moments:
        if checkpoint.manifest.iteration is not None:
            say(f"{checkpoint.folder}: holds no optimizer state, weights only")
        return None
    steps: dict[int, str] = {}
    groups: dict[str, dict[str, Any]] = {}
    for file in sorted({moment.file for moment in moments}):
        content, _ = ptfile.scan(checkpoint.folder / file)
        steps[content["step"]] = file
        for group in content["groups"]:
            options = {key: value for key, value in group.items() if key != "params"}
            joined = groups.setdefault(json.dumps(options, sort_keys=True), {**options, "params": set()})
            joined["params"] |= set(group["params"])
    if len(steps) > 1:
        said = ", ".join(f"{step} in {file}" for step, file in steps.items())
        raise UserError(
            f"{checkpoint.folder}: optimizer files disagree about the step ({said}). The checkpoint is not consistent."
        )
    canonical = {tensor.name: tensor.canonical for tensor in build(checkpoint.manifest.model).tensors.values()}
    return OptimizerHead(
        names=frozenset(canonical[moment.name] for moment in moments),
        step=next(iter(steps)),
        groups=[{**group, "params": sorted(group["params"])} for group in groups.values()],
    )
