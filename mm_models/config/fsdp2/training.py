"""`training`: steps, optimizer, learning rate, weights in and out, logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_models.config.fsdp2.kinds import Amount, Count, Fraction, Natural, Patterns, Text, only
from mm_models.config.strict import StrictModel

Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Training(StrictModel):
    micro_batch_size: Count = 1
    """Samples of one forward pass on one rank."""
    gradient_accumulation_steps: Count = 1
    """Forward passes of one step. Global batch = micro batch · accumulation · ranks."""
    seed: Natural = 1234
    train_iters: Count
    use_deter_comp: bool = False
    """Deterministic kernels only; a kernel that has none is an error."""

    optimizer: Annotated[str, only("adamw", why="only AdamW is there")] = "adamw"
    lr: Positive
    lr_min: Amount = 0.0
    lr_start: Amount = 0.0
    """Where the warm-up starts."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of train_iters after which lr_min is reached."""
    lr_warmup_ratio: Fraction = 0.0
    weight_decay: Amount = 0.0
    """Decoupled; biases and one-dimensional parameters have none."""
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.999
    adam_eps: Positive = 1e-8
    adam_fused: bool = True
    clip_grad: Amount = 1.0
    """Largest global gradient norm; 0 switches clipping off, the norm is logged either way."""

    init_model_with_meta_device: bool = True
    """Weights come from `load`. false: without `load` they come from model.model_name_or_path."""
    load: Text | None = None
    load_format: Literal["dcp", "hf", "auto"] = "auto"
    load_strict: bool = True
    allow_missing: Patterns = Field(default_factory=list)
    """With load_strict false: the names that may be absent from `load`; they start as from scratch."""
    ignore_unexpected: Patterns = Field(default_factory=list)
    """Names of `load` that the model does not have and that are left out, beyond the family's known extras."""
    from_scratch: bool = False
    """The only way to start without weights."""
    no_load_optim: bool = False
    no_load_rng: bool = False
    resume_schedule: Literal["config", "checkpoint"] | None = None
    """Whose learning-rate schedule a resumed run follows where they differ; null refuses a difference."""
    load_rank0_and_broadcast: bool = False

    save: Text | None = None
    """null saves nothing."""
    save_interval: Count | None = None
    """Iterations between checkpoints; the last one is always saved. null: only the last."""
    save_async: bool = False
    keep_last: Count | None = None
    """How many checkpoints of this run stay; null keeps all."""
    no_save_optim: bool = False
    no_save_rng: bool = False

    eval_interval: Count | None = None
    """Evaluate the validation split of `data` after every so many iterations and the last. null: never."""
    eval_iters: Count | None = None
    """Global batches of one evaluation, the first of the split. null: all its whole ones."""

    log_interval: Count = 1
    log_metrics: Text | None = None
    """File that gets one JSON object per iteration, numbers in full precision."""
    tensorboard_dir: Text | None = None
    exit_interval: Count | None = None
    """Save and leave after an iteration divisible by this."""
    distributed_timeout_minutes: Count = 30
    """A collective that waits longer stops the run."""
    plugin: list[Text] = Field(default_factory=list)
    """Modules, .py files or package folders that add registry entries."""

    @model_validator(mode="after")
    def _check(self):
        self._check_rates()
        self._check_start()
        if self.save is None and (given := [name for name in ("save_async", "keep_last") if getattr(self, name)]):
            raise ValueError(f"{', '.join(given)} without save would do nothing; name a folder in save or drop it")
        if self.eval_iters is not None and self.eval_interval is None:
            raise ValueError("eval_iters without eval_interval would do nothing; set eval_interval or drop it")
        return self

    def _check_rates(self) -> None:
        for name in ("lr_min", "lr_start"):
            if getattr(self, name) > self.lr:
                raise ValueError(f"{name} {getattr(self, name)} exceeds lr {self.lr}")
        if self.lr_decay_style != "constant" and self.lr_warmup_ratio >= self.lr_decay_ratio:
            raise ValueError(
                f"the warm-up (lr_warmup_ratio {self.lr_warmup_ratio}) does not end before the decay does "
                f"(lr_decay_ratio {self.lr_decay_ratio})"
            )

    def _check_start(self) -> None:
        if self.from_scratch and self.load is not None:
            raise ValueError(
                f"load {self.load} and from_scratch true contradict each other; set load to null or drop from_scratch"
            )
        if self.load is None and not self.from_scratch and self.init_model_with_meta_device:
            raise ValueError(
                "no weights to start from: init_model_with_meta_device is true and load is absent. Name a folder in load, or set "
                "from_scratch: true for random weights"
            )
        if not self.load_strict and not self.allow_missing:
            raise ValueError(
                "load_strict false goes on without tensors that are missing and needs allow_missing: [patterns] that names them; "
                "name them or set load_strict to true"
            )
        if self.load_strict and self.allow_missing:
            raise ValueError(
                "allow_missing has no effect while load_strict is true; set load_strict to false or drop it"
            )
