"""The file, the model and the number of processes judged together, before any process group exists.

`plan` turns a `RunConfig` into a `RunPlan`: the model, the sizes of the meshes, the plans as lists of names, where weights come
from, and the lines that say so. Every refusal names the key, the numbers and what would work. The model is built on the meta
device only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.config.bounds import Bounds
from mm_models.config.family import Family
from mm_models.config.fsdp2 import RunConfig, resolved
from mm_models.config.fsdp2.platform import check_platform
from mm_models.config.fsdp2.plugins import load as load_plugins
from mm_models.config.model import ModelConfig
from mm_models.data.files import find_files
from mm_models.errors import UserError
from mm_models.fsdp2 import sources
from mm_models.fsdp2.features import determinism, profiler
from mm_models.fsdp2.mesh import Sizes
from mm_models.fsdp2.outline import Outline, outline
from mm_models.fsdp2.plans import Plans, resolve_plans
from mm_models.fsdp2.sources import Source
from mm_models.ops import choose
from mm_models.registry import table
from mm_models.train import evaluation


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything about a run that is known before it starts.

    `hf_config` is the content of config.json. `num_microbatches` counts per rank and step. `expert_layout` is how the model holds
    experts; where it has none, the default, which says nothing. `lines` is what rank 0 prints: the resolved configuration and what
    it became.
    """

    config: RunConfig
    platform: str
    image_bounds: Bounds
    model: ModelConfig
    family: Family
    hf_config: Mapping[str, Any]
    sizes: Sizes
    global_batch_size: int
    num_microbatches: int
    plans: Plans
    source: Source
    expert_layout: str
    lines: tuple[str, ...]

    @property
    def dp(self) -> int:
        """Ranks that see different samples: all of them."""
        return self.sizes.world

    @property
    def loss_type(self) -> str:
        return self.config.features.loss_cfg.loss_type


def plan(config: RunConfig, world: int, platform: str) -> RunPlan:
    """The plan of `config` on `world` processes of `platform` (cpu, cuda, npu). A `UserError` for whatever cannot run."""
    plugins = load_plugins(config.training.plugin)
    table("models").target(config.model.model_id)  # ids that are only used later
    config.data.check_ids()
    profiler.check(config.tools, device_type=platform, world=world)
    if config.training.use_deter_comp:
        determinism.check(platform)
    family, model, hf_config = sources.read_model(config)
    experts = sources.has_experts(model)
    choices = check_platform(config, platform, experts=experts)
    source = sources.find_source(config, model)
    sources.check_paths(config, family, model, source)
    sizes = _sizes(config, world)
    _check_experts(config, model, sizes)
    layout = source.expert_layout or config.model.expert_layout or "stacked_hf"
    shape = outline(config.model.model_id, hf_config, platform=platform, expert_layout=layout)
    _check_loss(config, shape)
    plans = resolve_plans(config, shape)
    _check_cut(shape, plans, sizes, config.parallel.expert_parallel_size)
    basic = config.data.dataset_param.basic_parameters
    data = find_files(basic.files, basic.dataset_dir)
    training = config.training
    batch = training.micro_batch_size * training.gradient_accumulation_steps * world
    lines = [
        *_configuration(config),
        *plugins,
        *_environment(),
        f"model: {config.model.model_id} of {config.model.model_name_or_path}"
        + (f"; experts {layout}" if experts else ""),
        f"weights: {source.describe()}",
        f"data: {', '.join(map(str, data))}",
        *evaluation.planned(config.data, interval=training.eval_interval, option=option),
        *_layout_lines(config, sizes, experts=experts),
        f"batches: global {batch} = micro {training.micro_batch_size} · accumulation {training.gradient_accumulation_steps} · "
        f"{world} ranks; loss {config.features.loss_cfg.loss_type}",
        *plans.lines(),
        *choices,
        choose(platform).describe(),
        "checkpoints: "
        + (f"{training.save}, {_interval(training.save_interval)}" if training.save else "none, training.save is null"),
    ]
    return RunPlan(
        config=config,
        platform=platform,
        image_bounds=config.data.image_bounds(),
        model=model,
        family=family,
        hf_config=hf_config,
        sizes=sizes,
        global_batch_size=batch,
        num_microbatches=training.gradient_accumulation_steps,
        plans=plans,
        source=source,
        expert_layout=layout,
        lines=tuple(lines),
    )


def option(name: str) -> str:
    """A key of `training` with its section."""
    return f"training.{name}"


def _sizes(config: RunConfig, world: int) -> Sizes:
    parallel = config.parallel
    given = parallel.data_parallel_size
    if given not in (None, world):
        raise UserError(
            f"parallel.data_parallel_size: got {given}, but every process sees its own samples: {world} processes make it {world}. "
            "Correct it or drop it."
        )
    shard = None if parallel.fully_shard_parallel_size == "auto" else parallel.fully_shard_parallel_size
    try:
        return Sizes.of(
            world, shard=shard, ep=parallel.expert_parallel_size, ep_fsdp=parallel.expert_fully_shard_parallel_size
        )
    except UserError as error:
        raise UserError(f"parallel.{error}") from error


def _check_experts(config: RunConfig, model: ModelConfig, sizes: Sizes) -> None:
    if not sources.has_experts(model):
        _check_no_experts(config)
        return
    experts = model.text.num_moe_experts
    if experts % sizes.ep:
        fitting = [n for n in range(1, experts + 1) if experts % n == 0 and sizes.world % n == 0]
        raise UserError(
            f"parallel.expert_parallel_size: {experts} experts do not divide by {sizes.ep}. Possible on {sizes.world} processes: {fitting}."
        )


def _check_no_experts(config: RunConfig) -> None:
    """Refuse what asks for something of experts, of a model without them. Plans are judged by their names."""
    for key, got, neutral in (
        ("parallel.expert_parallel_size", config.parallel.expert_parallel_size, (1,)),
        ("parallel.ep_plan.use_npu_fused_ops", config.parallel.ep_plan.use_npu_fused_ops, (None, False)),
        ("model.expert_layout", config.model.expert_layout, (None,)),
        ("features.loss_cfg.router_aux_loss_coef", config.features.loss_cfg.router_aux_loss_coef, (0,)),
    ):
        if got not in neutral:
            raise UserError(f"{key}: got {got}, but the model has no experts. Leave it out.")


def _check_cut(shape: Outline, plans: Plans, sizes: Sizes, ep: int) -> None:
    """Dimension 1 of every expert parameter must divide by the ranks it is cut over."""
    for module in plans.ep:
        for name, size in shape.parameters_of(module).items():
            if len(size) < 2 or size[1] % sizes.ep_fsdp:
                per = sizes.world // ep
                fitting = [n for n in range(1, per + 1) if per % n == 0 and len(size) > 1 and size[1] % n == 0]
                raise UserError(
                    f"{name} {tuple(size)}: dimension 1 does not divide by the {sizes.ep_fsdp} ranks experts are cut over "
                    f"(world {sizes.world} / expert_parallel_size {ep} / {sizes.ep_replicate} copies). "
                    f"Set parallel.expert_fully_shard_parallel_size to one of {fitting}."
                )


def _check_loss(config: RunConfig, shape: Outline) -> None:
    features = config.features
    if (coefficient := features.loss_cfg.router_aux_loss_coef) != 0:
        free = next((name for name in shape.buffers if name.endswith("e_score_correction_bias")), None)
        why = (
            f"this model balances its experts by {free.rsplit('.', 1)[-1]}, not by a loss"
            if free
            else "the auxiliary loss is not there yet"
        )
        raise UserError(f"features.loss_cfg.router_aux_loss_coef: got {coefficient}; {why}. Set it to 0.")
    module = features.chunkloss_plan.apply_module
    if module != shape.head:
        raise UserError(
            f"features.chunkloss_plan.apply_module: got {module!r}, but the loss is computed in the head. "
            f"Set it to {shape.head}."
        )


def _configuration(config: RunConfig) -> list[str]:
    return [
        "---------------------- configuration ----------------------",
        *resolved(config).splitlines(),
        "------------------ end of configuration -------------------",
    ]


def _environment() -> list[str]:
    if "NON_MEGATRON" not in os.environ:
        return []
    return [
        f"environment: NON_MEGATRON={os.environ['NON_MEGATRON']} is without effect, this target never loads megatron"
    ]


def _layout_lines(config: RunConfig, sizes: Sizes, *, experts: bool) -> list[str]:
    asked = config.parallel.fully_shard_parallel_size
    became = f" (auto: all {sizes.world} ranks)" if asked == "auto" else ""
    copies = f", {sizes.replicate} copies of the model" if sizes.replicate > 1 else ""
    lines = [f"layout: {sizes.world} processes = replicate {sizes.replicate} · shard {sizes.shard}{became}{copies}"]
    if experts:
        default = " (default)" if config.parallel.expert_fully_shard_parallel_size is None else ""
        lines.append(
            f"experts: {sizes.world} processes = copies {sizes.ep_replicate} · sharded {sizes.ep_fsdp}{default} · ep {sizes.ep}"
        )
    return lines


def _interval(every: int | None) -> str:
    return "the last iteration" if every is None else f"every {every} iterations and the last"
