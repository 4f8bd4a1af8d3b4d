"""Flags, model.json, data.json and the number of processes judged together, before any process group exists.

`plan` turns `Arguments` into a `RunPlan`: the model, the layout, the split of layers over stages, the number of
micro-batches. Every refusal names the flags, the numbers and what would work. No torch in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mm_models.config.bounds import Bounds
from mm_models.config.data import DataConfig, load_data_config
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.mcore.arguments import Arguments, option
from mm_models.ops import choose
from mm_models.train import evaluation
from mm_models.weights.hffolder import is_hf_folder
from mm_models.weights.mmfolder import RELEASE, iterations

FUSED = {
    "use_fused_rmsnorm": "rms_norm",
    "use_fused_swiglu": "swiglu",
    "use_flash_attn": "causal_attention",
    "use_fused_rotary_pos_emb": "rotary",
}
"""Flag -> the op whose variant it chooses."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything about a run that is known before it starts. `num_microbatches` counts per data-parallel rank and step."""

    args: Arguments
    model: ModelConfig
    data: DataConfig
    image_bounds: Bounds
    layout: ParallelLayout
    split: ModelSplit
    global_batch_size: int
    num_microbatches: int
    notes: tuple[str, ...] = ()
    """What the reader of model.json has to say, and what becomes of a validation split."""

    @property
    def loss_type(self) -> str:
        return self.model.loss_cfg.loss_type


def plan(args: Arguments, world: int, *, device: str = "cpu") -> RunPlan:
    """The plan of `args` on `world` processes of `device` (cpu, cuda, npu). A `UserError` for whatever cannot run."""
    _check_start(args)
    _check_schedule(args)
    _check_recompute(args)
    _check_fused(args, device)
    notes: list[str] = []
    model = load_model_config(args.mm_model, notes.append)
    _check_bridge(args, model)
    layout = _layout(args, world)
    model.check_layout(layout)
    _check_sequence_parallel(args, model, layout)
    global_batch_size, num_microbatches = _batches(args, layout)
    data = _data(args)
    notes += evaluation.planned(data, interval=args.eval_interval, option=option)
    return RunPlan(
        args=args,
        model=model,
        data=data,
        image_bounds=data.image_bounds(),
        layout=layout,
        split=model.split(layout),
        global_batch_size=global_batch_size,
        num_microbatches=num_microbatches,
        notes=tuple(notes),
    )


def _check_bridge(args: Arguments, model: ModelConfig) -> None:
    """`patch.bridge_patch` says that a run starts from Hugging Face weights; what it then saves it may resume from."""
    if model.patch is None or not model.patch.bridge_patch or is_hf_folder(Path(args.load or "")):
        return
    folder = Path(args.load or "")
    if args.load is None or args.finetune or not folder.is_dir() or set(iterations(folder)) <= {RELEASE}:
        raise UserError(
            f"{args.mm_model}: patch.bridge_patch is true, so --load must name a Hugging Face folder (it is loaded on any topology) "
            f"or a training checkpoint to resume; got {args.load}. Set bridge_patch to false for converted weights."
        )


def _data(args: Arguments) -> DataConfig:
    """data.json, with the number of workers and the pixel bounds from the command line where they were given."""
    data = load_data_config(args.mm_data)
    data.check_ids()
    loader, parameters = data.dataloader_param, data.dataset_param
    if args.num_workers is not None:
        loader = loader.model_copy(update={"num_workers": args.num_workers})
    given = Bounds(least=args.image_min_pixels, most=args.image_max_pixels).record()
    preprocess = parameters.preprocess_parameters.model_copy(update=given)
    parameters = parameters.model_copy(update={"preprocess_parameters": preprocess})
    return data.model_copy(update={"dataloader_param": loader, "dataset_param": parameters})


def _layout(args: Arguments, world: int) -> ParallelLayout:
    if args.context_parallel_size > 1:
        raise UserError(
            f"--context-parallel-size {args.context_parallel_size}: context parallelism is not there yet. Set it to 1, "
            "and cut long sequences with --sequence-parallel or preprocess_parameters.cutoff_len."
        )
    return ParallelLayout.for_world(
        world,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )


def _batches(args: Arguments, layout: ParallelLayout) -> tuple[int, int]:
    """(global batch size, micro-batches per rank and step), with the arithmetic in every refusal."""
    micro, dp = args.micro_batch_size, layout.dp
    total = args.global_batch_size or micro * dp
    if total % (micro * dp):
        lower = total // (micro * dp) * micro * dp
        choices = [str(size) for size in (lower, lower + micro * dp) if size]
        raise UserError(
            f"--global-batch-size {total} does not divide by micro-batch size · DP = {micro} · {dp} = {micro * dp} "
            f"(remainder {total % (micro * dp)}). Possible nearby: {' or '.join(choices)}."
        )
    count = total // (micro * dp)
    if layout.vpp > 1 and count % layout.pp:
        nearest = (count // layout.pp + 1) * layout.pp
        raise UserError(
            f"the interleaved schedule needs a number of micro-batches that divides by PP {layout.pp}, got {count} = "
            f"global batch size {total} / (micro-batch size {micro} · DP {dp}). "
            f"Use --global-batch-size {nearest * micro * dp} ({nearest} micro-batches) or drop --virtual-pipeline-model-parallel-size."
        )
    return total, count


def _check_sequence_parallel(args: Arguments, model: ModelConfig, layout: ParallelLayout) -> None:
    if args.sequence_parallel and layout.tp == 1:
        raise UserError(
            "--sequence-parallel cuts the sequence over TP ranks, and TP is 1. Drop it or raise --tensor-model-parallel-size."
        )
    if layout.tp > 1 and model.text is not None and model.text.num_moe_experts and not args.sequence_parallel:
        raise UserError(
            f"--tensor-model-parallel-size {layout.tp} on a model with {model.text.num_moe_experts} experts needs --sequence-parallel: "
            "without it every TP rank would route the same tokens. Add --sequence-parallel."
        )


def _check_start(args: Arguments) -> None:
    """Where weights come from, and the flags that only mean something with --load or --save."""
    if args.load is None and not args.from_scratch:
        raise UserError("no weights to start from: give --load FOLDER, or --from-scratch for random weights.")
    if args.load is not None and args.from_scratch:
        raise UserError(f"--load {args.load} and --from-scratch contradict each other; keep one.")
    if args.load is None:
        needs_load = ("ckpt_step", "finetune", "no_load_optim", "no_load_rng")
        needs_load += ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
        _refuse_alone(args, needs_load, "--load")
    if args.save is None:
        _refuse_alone(args, ("save_interval", "no_save_optim"), "--save")
    if args.eval_interval is None:
        _refuse_alone(args, ("eval_iters",), "--eval-interval")
    if args.dump_tokens is None and args.dump_batches != Arguments.dump_batches:
        raise UserError("--dump-batches without --dump-tokens would do nothing. Add --dump-tokens or drop it.")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UserError(
            f"{option('override_opt_param_scheduler')} and {option('use_checkpoint_opt_param_scheduler')} contradict each other; keep one."
        )


def _refuse_alone(args: Arguments, names: tuple[str, ...], needed: str) -> None:
    given = [option(name) for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise UserError(
            f"{', '.join(given)} without {needed} would do nothing. Add {needed} or drop {'it' if len(given) == 1 else 'them'}."
        )


def _check_schedule(args: Arguments) -> None:
    """Learning-rate schedule and Adam's numbers."""
    if args.lr_warmup_iters is not None and args.lr_warmup_fraction is not None:
        raise UserError("--lr-warmup-iters and --lr-warmup-fraction both say how long the warm-up is; keep one.")
    if args.lr <= 0:
        raise UserError(f"--lr: got {args.lr}, expected more than 0.")
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(args, name) > args.lr:
            raise UserError(f"{option(name)} {getattr(args, name)} exceeds --lr {args.lr}.")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(args, name) >= 1:
            raise UserError(f"{option(name)}: got {getattr(args, name)}, expected less than 1.")
    decay, warmup = decay_iters(args), warmup_iters(args)
    if warmup >= decay:
        raise UserError(
            f"the warm-up of {warmup:g} iterations does not end before the decay of {decay} iterations "
            "(--lr-decay-iters, else --train-iters)."
        )


def decay_iters(args: Arguments) -> int:
    """Iterations from the first step to the lowest learning rate."""
    return args.lr_decay_iters or args.train_iters


def warmup_iters(args: Arguments) -> float:
    """Iterations of linear warm-up; a fraction may end between two iterations, as in Megatron."""
    if args.lr_warmup_fraction is not None:
        return args.lr_warmup_fraction * decay_iters(args)
    return args.lr_warmup_iters or 0


def _check_recompute(args: Arguments) -> None:
    if args.recompute_granularity == "full":
        if args.recompute_method is None:
            raise UserError("--recompute-granularity full needs --recompute-method uniform or block.")
        return
    given = [option(name) for name in ("recompute_method", "recompute_num_layers") if getattr(args, name) is not None]
    if given:
        raise UserError(
            f"{', '.join(given)} belongs to --recompute-granularity full, got {args.recompute_granularity or 'none'}."
        )


def _check_fused(args: Arguments, device: str) -> None:
    given = [name for name in FUSED if getattr(args, name)]
    try:
        choose(device, [FUSED[name] for name in given])
    except UserError as error:
        raise UserError(f"{', '.join(map(option, given))}: {error}") from error
