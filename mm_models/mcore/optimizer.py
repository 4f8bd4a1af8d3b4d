"""AdamW from megatron-core, and one accessor of ours over everything it steps.

Core keeps what it steps in parallel lists: a model parameter here, the fp32 tensor that AdamW really steps (its master:
the parameter itself, an fp32 copy, or a flat slice of either under the distributed optimizer) at the same place of
another list. `shards` walks those lists once and names every piece. Norm, clipping, saving and loading all go through
it. Core's own state accessors are not used: with an fp32 parameter in a bf16 model they return another parameter's state
(0.16.1, `distrib_optimizer.py` 290 against 441).

On disk (`export_state`, `import_state`) a shard is: global parameter name -> flat range of this rank's local tensor, its
shape, master, exp_avg and exp_avg_sq as 1-D fp32. The same at any DP, with and without `--use-distributed-optimizer`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_models.errors import UserError
from mm_models.mcore.arguments import Arguments

MOMENTS = ("exp_avg", "exp_avg_sq")
GROUP_OPTIONS = ("lr", "weight_decay", "betas", "eps", "wd_mult", "is_expert_parallel")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What this rank steps of one parameter: elements [start, end) of the flattened local tensor.

    `main` is the fp32 tensor AdamW steps (its `.grad` holds the gradient after `prepare_grads`); `inner` the torch
    optimizer that holds its state.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    end: int
    main: Tensor
    inner: torch.optim.Optimizer

    @property
    def expert(self) -> bool:
        """Whether the parameter is an expert's: reduced over expert-data-parallel ranks, stored with the experts."""
        return not getattr(self.param, "allreduce", True)


def build(args: Arguments, chunks: Sequence[torch.nn.Module]):
    """Core's optimizer over DDP-wrapped `chunks`. Clipping is left to `grads`; a rank without a trainable parameter is fine.

    Refused when no rank has anything to train.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    _refuse_all_frozen(chunks)
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        clip_grad=0.0,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*there is no optimizer on RANK.*")
        optimizer = get_megatron_optimizer(config, list(chunks))
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # one pass over memory; torch has it for CPU, CUDA and NPU tensors alike
    return optimizer


def _refuse_all_frozen(chunks: Sequence[torch.nn.Module]) -> None:
    here = sum(p.requires_grad for chunk in chunks for p in chunk.parameters())
    total = torch.tensor(here, device=_device_of(chunks))
    torch.distributed.all_reduce(total)
    if total.item() == 0:
        raise UserError("every parameter is frozen: nothing to train. Set freeze to false in a section of model.json.")


def _device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    return next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))


def _inner_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def shards(optimizer, chunks: Sequence[torch.nn.Module]) -> list[Shard]:
    """Every piece this rank steps, in the order of the parameters' names in `chunks`."""
    names = parameter_names(chunks)
    found = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for param, main, start, end in _pairs(part):
            assert main.numel() == end - start, (names[param], main.shape, start, end)
            found.append(Shard(name=names[param], param=param, start=start, end=end, main=main, inner=part.optimizer))
    order = {name: place for place, name in enumerate(names.values())}
    return sorted(found, key=lambda shard: order[shard.name])


def parameter_names(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Parameter -> its global name, wrappers' prefixes removed."""
    names: dict[torch.nn.Parameter, str] = {}
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            names.setdefault(param, name)
    return names


def _pairs(part) -> Iterator[tuple[torch.nn.Parameter, Tensor, int, int]]:
    """(model parameter, tensor that is stepped, flat start, flat end) of one of core's three optimizer classes."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if isinstance(part, DistributedOptimizer):
        pairs = [
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ]
        for model_groups, main_groups in pairs:
            for param, main in _zip_groups(model_groups, main_groups):
                piece = part._get_model_param_range_map(param)["param"]
                yield param, main, piece.start, piece.end
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        pairs = [
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        ]
        for model_groups, main_groups in pairs:
            for param, main in _zip_groups(model_groups, main_groups):
                yield param, main, 0, param.numel()
    else:
        assert isinstance(part, FP32Optimizer), type(part)
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield param, param, 0, param.numel()


def _zip_groups(left: list[list], right: list[list]) -> Iterator[tuple]:
    for first, second in zip(left, right, strict=True):
        yield from zip(first, second, strict=True)


def no_decay(pieces: Iterable[Shard], optimizer) -> list[str]:
    """Names of the parameters that have no weight decay (biases and one-dimensional ones)."""
    exempt = {
        id(main)
        for inner in _inner_optimizers(optimizer)
        for group in inner.param_groups
        if group["wd_mult"] == 0
        for main in group["params"]
    }
    return sorted(piece.name for piece in pieces if id(piece.main) in exempt)


def export_state(pieces: Sequence[Shard]) -> dict:
    """The state of `pieces` in the on-disk format. Tensors are detached views; a state not stepped yet is zero at step 0.

    A rank without pieces (all frozen, or all elements with its data-parallel peers) has no `params`: it writes no file.
    """
    steps, params = set(), {}
    for piece in pieces:
        state = piece.inner.state.get(piece.main, {})
        steps.add(int(state["step"]) if "step" in state else 0)
        moments = {
            key: state[key].detach().view(-1) if key in state else torch.zeros(piece.end - piece.start)
            for key in MOMENTS
        }
        params[piece.name] = {
            "range": (piece.start, piece.end),
            "shape": tuple(piece.param.shape),
            "master": piece.main.detach().view(-1),
            **moments,
        }
    assert len(steps) <= 1, f"parameters were stepped unequally often: {sorted(steps)}"
    return {"params": params, "step": steps.pop() if steps else 0, "groups": _groups(pieces)}


def _groups(pieces: Sequence[Shard]) -> list[dict]:
    """The options of each parameter group with the names in it, as plain values."""
    names = {id(piece.main): piece.name for piece in pieces}
    found = []
    for inner in {id(piece.inner): piece.inner for piece in pieces}.values():
        for group in inner.param_groups:
            members = sorted(names[id(main)] for main in group["params"] if id(main) in names)
            if members:
                found.append({key: group[key] for key in GROUP_OPTIONS} | {"params": members})
    return found


def import_state(
    pieces: Sequence[Shard], files: Iterable[tuple[str, Mapping]], *, trainable: Iterable[str], where: str
) -> list[str]:
    """Fill masters and moments of `pieces` from files in the on-disk format, whatever ranges those were cut into.

    `files` yields (path, content). Together they must hold every element of every piece exactly once, agree about the
    step, and name no parameter outside `trainable` (all that is trained on this rank's stages, at any data-parallel rank).
    Returns one line per group option that differs from the saved one.
    """
    wanted, trainable = {piece.name: piece for piece in pieces}, set(trainable)
    filled = dict.fromkeys(wanted, 0)
    unexpected: set[str] = set()
    steps: dict[int, str] = {}
    changes: list[str] = []
    for path, content in files:
        if content["params"]:
            steps.setdefault(content["step"], path)
        changes += [change for change in _option_changes(pieces, content["groups"]) if change not in changes]
        for name, saved in content["params"].items():
            if name not in trainable:
                unexpected.add(name)
            elif name in wanted:
                filled[name] += _take(wanted[name], saved, content["step"], path)
    if len(steps) > 1:
        raise UserError(
            f"{where}: optimizer files disagree about the step: {', '.join(f'{path} has {step}' for step, path in steps.items())}."
        )
    missing = [
        f"{name} ({filled[name]} of {piece.end - piece.start} elements)"
        for name, piece in wanted.items()
        if filled[name] != piece.end - piece.start
    ]
    if missing or unexpected:
        raise UserError(
            f"{where}: the optimizer state does not fit what this run trains. "
            + (f"Missing: {', '.join(sorted(missing))}. " if missing else "")
            + (f"Saved but not trained here: {', '.join(sorted(unexpected))}. " if unexpected else "")
            + "Train the parameters the saved run trained, or start the optimizer afresh with --no-load-optim."
        )
    return changes


@torch.no_grad()
def _take(piece: Shard, saved: Mapping, step: int, path: str) -> int:
    """Copy what `saved` holds of `piece`; the number of elements copied."""
    if tuple(saved["shape"]) != tuple(piece.param.shape):
        raise UserError(
            f"{path}: {piece.name} has shape {tuple(saved['shape'])}, this run's is {tuple(piece.param.shape)}."
        )
    begin, stop = saved["range"]
    lengths = {key: saved[key].numel() for key in ("master", *MOMENTS)}
    if set(lengths.values()) != {stop - begin}:
        raise UserError(f"{path}: {piece.name} claims range {(begin, stop)} but its tensors have {lengths} elements.")
    low, high = max(begin, piece.start), min(stop, piece.end)
    if low >= high:
        return 0
    state = piece.inner.state[piece.main]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=piece.main.device)
        state.update({key: torch.zeros_like(piece.main, requires_grad=False) for key in MOMENTS})
    state["step"].fill_(step)
    for key, target in (("master", piece.main.detach()), *((key, state[key]) for key in MOMENTS)):
        target.view(-1)[low - piece.start : high - piece.start].copy_(saved[key][low - begin : high - begin])
    return high - low


def _option_changes(pieces: Sequence[Shard], saved_groups: Sequence[Mapping]) -> list[str]:
    """Options of this run that differ from the saved ones; the learning rate is the scheduler's business."""
    saved = {name: group for group in saved_groups for name in group["params"]}
    changes = []
    for group in _groups(pieces):
        before = next((saved[name] for name in group["params"] if name in saved), None)
        for key in GROUP_OPTIONS:
            if before is not None and key != "lr" and before[key] != group[key]:
                changes.append(f"{key} was {before[key]}, is now {group[key]}")
    return changes
