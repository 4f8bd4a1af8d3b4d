"""The command line of `pretrain_vlm.py`: Megatron's flag names as one frozen dataclass, and a strict parser made from it.

A field is a flag: `micro_batch_size` is `--micro-batch-size`; its annotation is the type, its metadata the help text,
group, bound and choices. `parse` refuses an unknown flag (with the nearest name), an abbreviation, a flag given twice,
a missing or mistyped value and stray words, each by name. What values mean together is judged in `setup.validate`.

Nothing heavy is imported here: `--help` answers in a fraction of a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mm_models.errors import UserError, nearest, unknown_name

_REQUIRED = object()


def _flag(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    choices: tuple[str, ...] | None = None,
    spelled: str | None = None,
) -> Any:
    meta = {"help": text, "least": least, "choices": choices, "spelled": spelled, "required": default is _REQUIRED}
    return field(metadata=meta) if default is _REQUIRED else field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Every flag with its value. Field order is the order of `--help`."""

    # Model and data
    mm_model: str = _flag(_REQUIRED, "model.json: which components, how large, what is frozen, how stages split")
    mm_data: str = _flag(_REQUIRED, "data.json: the dataset, its template and its collator")
    plugin: tuple[str, ...] = _flag((), "modules or .py files that add registry entries (one flag, several values)")
    num_workers: int | None = _flag(
        None, "loader processes per rank (default: dataloader_param.num_workers of data.json)", least=0
    )
    image_max_pixels: int | None = _flag(
        None, "most pixels of one image after resizing (default: data.json's, else the processor's own)", least=1
    )
    image_min_pixels: int | None = _flag(
        None, "least pixels of one image after resizing (default: data.json's, else the processor's own)", least=0
    )

    # Topology
    tensor_model_parallel_size: int = _flag(1, "TP: ranks a tensor is cut over", least=1)
    pipeline_model_parallel_size: int = _flag(1, "PP: pipeline stages", least=1)
    virtual_pipeline_model_parallel_size: int = _flag(1, "VPP: model chunks per stage (interleaved schedule)", least=1)
    expert_model_parallel_size: int = _flag(1, "EP: ranks the routed experts are spread over", least=1)
    expert_tensor_parallel_size: int | None = _flag(None, "ETP: ranks one expert is cut over (default: TP)", least=1)
    context_parallel_size: int = _flag(1, "CP: only 1 for now", least=1)
    sequence_parallel: bool = _flag(False, "keep activations of the text decoder cut along the sequence over TP")
    distributed_backend: str | None = _flag(
        None, "communication backend (default: the device's own)", choices=("gloo", "nccl", "hccl")
    )
    distributed_timeout_minutes: int = _flag(10, "a collective that waits longer stops the run", least=1)

    # Steps and batches
    micro_batch_size: int = _flag(_REQUIRED, "samples per forward pass on one data-parallel rank", least=1)
    global_batch_size: int | None = _flag(None, "samples per optimizer step (default: micro-batch size · DP)", least=1)
    train_iters: int = _flag(_REQUIRED, "optimizer steps of the whole run", least=1)
    exit_interval: int | None = _flag(None, "save and leave after an iteration divisible by this", least=1)
    eval_interval: int | None = _flag(
        None,
        "evaluate the validation split of data.json after every so many iterations and the last (default: never)",
        least=1,
    )
    eval_iters: int | None = _flag(
        None, "global batches of one evaluation, the first of the split (default: all its whole ones)", least=1
    )
    seed: int = _flag(1234, "seed of initial weights, shuffling and dropout", least=0)

    # Optimizer
    lr: float = _flag(_REQUIRED, "highest learning rate", least=0.0)
    min_lr: float = _flag(0.0, "lowest learning rate of the decay", least=0.0)
    lr_decay_style: str = _flag(
        "linear", "shape of the decay after the warm-up", choices=("constant", "linear", "cosine")
    )
    lr_decay_iters: int | None = _flag(None, "iterations the decay spans (default: --train-iters)", least=1)
    lr_warmup_iters: int | None = _flag(None, "iterations of linear warm-up (default: 0)", least=0)
    lr_warmup_fraction: float | None = _flag(
        None, "warm-up as a fraction of the decay, in place of iterations", least=0.0
    )
    lr_warmup_init: float = _flag(0.0, "learning rate the warm-up starts from", least=0.0)
    weight_decay: float = _flag(0.01, "decoupled decay; biases and one-dimensional parameters have none", least=0.0)
    adam_beta1: float = _flag(0.9, "first-moment decay", least=0.0)
    adam_beta2: float = _flag(0.999, "second-moment decay", least=0.0)
    adam_eps: float = _flag(1e-8, "added to the root of the second moment", least=0.0)
    clip_grad: float = _flag(
        1.0, "largest global gradient norm; 0 switches clipping off, the norm is logged either way", least=0.0
    )
    use_distributed_optimizer: bool = _flag(False, "shard optimizer state over data-parallel ranks")
    override_opt_param_scheduler: bool = _flag(
        False, "at resume: the command line's learning-rate schedule wins", spelled="--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = _flag(
        False, "at resume: the saved learning-rate schedule wins", spelled="--use-checkpoint-opt_param-scheduler"
    )

    # Precision and operators
    bf16: bool = _flag(False, "bfloat16 parameters and activations, fp32 masters and gradient sums")
    use_fused_rmsnorm: bool = _flag(False, "the device's fused RMSNorm; refused where there is none")
    use_fused_swiglu: bool = _flag(False, "the device's fused SwiGLU; refused where there is none")
    use_flash_attn: bool = _flag(False, "the device's flash attention; refused where there is none")
    use_fused_rotary_pos_emb: bool = _flag(False, "the device's fused rotary embedding; refused where there is none")

    # Recompute
    recompute_granularity: str | None = _flag(
        None, "what backward computes again instead of storing", choices=("full", "selective")
    )
    recompute_method: str | None = _flag(None, "full recompute: how layers are chosen", choices=("uniform", "block"))
    recompute_num_layers: int | None = _flag(
        None, "full recompute: layers per unit (uniform) or per stage (block)", least=1
    )

    # Checkpoints
    load: str | None = _flag(None, "Hugging Face folder, converted folder or training checkpoint to start from")
    ckpt_step: int | None = _flag(None, "iteration to load (default: the one the tracker names)", least=0)
    from_scratch: bool = _flag(False, "start from random weights; without it a run needs --load")
    finetune: bool = _flag(False, "take only the weights of --load and start at iteration 0")
    no_load_optim: bool = _flag(False, "do not take the optimizer state of --load")
    no_load_rng: bool = _flag(False, "do not take the random states of --load")
    exit_on_missing_checkpoint: bool = _flag(False, "accepted and always so: a --load that holds nothing is an error")
    save: str | None = _flag(None, "folder training checkpoints go to")
    save_interval: int | None = _flag(
        None, "iterations between checkpoints (the last iteration is always saved)", least=1
    )
    no_save_optim: bool = _flag(False, "leave the optimizer state out of checkpoints")

    # Watching
    log_interval: int = _flag(1, "iterations between log lines", least=1)
    log_metrics: str | None = _flag(None, "file that gets one JSON object per iteration, numbers in full precision")
    tensorboard_dir: str | None = _flag(None, "folder for TensorBoard scalars")
    check_replicas: int = _flag(
        0, "compare replicated tensors across ranks every N iterations, at load and at save; 0: never", least=0
    )
    check_batches: int = _flag(
        100, "compare sample ids across model-parallel ranks every N iterations after the first five", least=1
    )
    dump_tokens: str | None = _flag(None, "folder for the first batches as the model receives them (mm-models tokens)")
    dump_batches: int = _flag(8, "with --dump-tokens: how many steps", least=1)
    check: bool = _flag(False, "validate flags, files and layout, then stop")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }


SYNONYMS = {"--learning-rate": "--lr", "--batch-size": "--micro-batch-size", "--tp": "--tensor-model-parallel-size"}
SYNONYMS |= {
    "--pp": "--pipeline-model-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--max-steps": "--train-iters",
}
"""What people type for a flag whose name is far from it: only used to name the flag they meant."""


def option(name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`; two of Megatron's flags keep an underscore."""
    spelled = Arguments.__dataclass_fields__[name].metadata["spelled"]
    return spelled or "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}.")


def parse(argv: Sequence[str]) -> Arguments:
    """`argv` (without the program's name) as `Arguments`. `--help` prints and exits 0; anything wrong is a `UserError`."""
    _refuse_unknown_and_repeated(argv)
    values = vars(_parser().parse_args(list(argv)))
    return Arguments(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _refuse_unknown_and_repeated(argv: Sequence[str]) -> None:
    known = {option(f.name) for f in dataclasses.fields(Arguments)} | {"--help", "-h"}
    seen: set[str] = set()
    for word in argv:
        name = word.split("=", 1)[0]
        if not re.match(r"--?[A-Za-z]", name):
            continue
        if name not in known:
            close = nearest(name, known | set(SYNONYMS))
            if close in SYNONYMS:
                raise UserError(f"unknown option {name!r} in the command line; did you mean {SYNONYMS[close]!r}?")
            raise unknown_name("option", name, known - {"-h"}, where="the command line")
        if name in seen:
            raise UserError(f"command line: {name} is given twice; keep one.")
        seen.add(name)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_vlm.py",
        description="Train a vision-language model on megatron-core. Start with torchrun; one process needs none.",
        allow_abbrev=False,
    )
    for f in dataclasses.fields(Arguments):
        meta, kind = f.metadata, f.type
        options: dict[str, Any] = {"help": meta["help"], "dest": f.name, "required": meta["required"]}
        if not meta["required"]:
            options["default"] = f.default
            if type(f.default) in (int, float, str):
                options["help"] += f" (default: {f.default})"
        if kind == "bool":
            options["action"] = "store_true"
            del options["default"]
        else:
            options["metavar"] = "|".join(meta["choices"]) if meta["choices"] else _METAVARS[kind]
            options["type"] = _reader(kind, meta["least"], meta["choices"])
            if kind.startswith("tuple"):
                options["nargs"] = "+"
        parser.add_argument(option(f.name), **options)
    return parser


_METAVARS = {
    "int": "N",
    "int | None": "N",
    "float": "X",
    "float | None": "X",
    "str": "PATH",
    "str | None": "PATH",
    "tuple[str, ...]": "NAME",
}


def _reader(kind: str, least: float | None, choices: tuple[str, ...] | None):
    """The function that turns one word into a value of `kind`, or says what is wrong with it."""

    def read(word: str) -> Any:
        if kind.startswith(("str", "tuple")):
            if not word:
                raise argparse.ArgumentTypeError("got an empty value")
            if choices and word not in choices:
                raise argparse.ArgumentTypeError(f"got {word!r}, expected {' or '.join(choices)}")
            return word
        value = _whole(word) if kind.startswith("int") else _number(word)
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"got {word}, expected at least {least}")
        return value

    return read


def _whole(word: str) -> int:
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)", word):
        raise argparse.ArgumentTypeError(
            f"got {word!r}, expected a whole number such as 12 (no leading zero, separator or exponent)"
        )
    return int(word)


def _number(word: str) -> float:
    if not re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", word) or not math.isfinite(float(word)):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a finite number such as 0.1 or 1e-5")
    return float(word)
