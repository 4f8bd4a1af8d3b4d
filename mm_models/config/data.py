"""The schema of data.json (and of the YAML's `data` section): closed, strict, with the names of the field.

    {"dataset_param": {"dataset_type", "attr", "preprocess_parameters", "basic_parameters"}, "dataloader_param": {...}}

A key whose work is not there yet is still in the schema, so that a file of the field can be read; a value that would
ask for that work is refused by name. `video_*` settings are read and act on samples with video, which the data set
refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mm_models.config.bounds import Bounds, used
from mm_models.config.strict import StrictModel, load_json, validate
from mm_models.errors import unknown_name
from mm_models.registry import table

Count = Annotated[int, Field(gt=0)]
Pixels = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


def _only(*allowed: Any) -> AfterValidator:
    """Accept the listed values alone: the others ask for work that is not there yet."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"not supported yet, the only accepted value is {' or '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


def _names(value: str | list[str]) -> list[str]:
    """A list of names, also from one text with commas."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Attributes(StrictModel):
    """Which keys of a row hold what. A null column is one the file does not have."""

    messages: Name = "messages"
    images: Name | None = "images"
    videos: Name | None = "videos"
    system: Name | None = None
    """A column with the system text of the whole conversation; system messages inside `messages` are read without
    it."""
    role_tag: Name = "role"
    content_tag: Name = "content"
    user_tag: Name = "user"
    assistant_tag: Name = "assistant"
    system_tag: Name | None = "system"
    observation_tag: Name | None = None
    """With `function_tag`: roles of tool use. Accepted, and a row that has one is refused as any role but the three."""
    function_tag: Name | None = None


class PreprocessParameters(StrictModel):
    """The processor: where it is and how many pixels an image may have."""

    model_name_or_path: Name
    trust_remote_code: bool = True
    """Accepted and without effect: only stock Hugging Face classes are used, no code of the folder runs."""
    use_fast_tokenizer: bool = True
    """False is refused for a tokenizer that transformers has in its fast form alone."""
    split_special_tokens: bool = False
    """Without effect: template tokens are always special, and text of a sample never becomes one."""
    image_max_pixels: Count | None = None
    """Most pixels (height x width) of one image after resizing; null keeps the folder's bound."""
    image_min_pixels: Pixels | None = None
    video_max_pixels: Pixels | None = None
    video_min_pixels: Pixels | None = None
    video_fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    video_maxlen: Count = 64

    @model_validator(mode="after")
    def _check(self):
        if None not in (self.image_min_pixels, self.image_max_pixels) and self.image_min_pixels > self.image_max_pixels:
            raise ValueError(
                f"image_min_pixels {self.image_min_pixels} exceeds image_max_pixels {self.image_max_pixels}"
            )
        return self


class BasicParameters(StrictModel):
    """The data set and how its rows become samples."""

    template: Name
    dataset_dir: Name = "."
    """Base of relative image paths."""
    dataset: Name | list[Name]
    """JSON, JSONL or Parquet files, as a list or with commas between them: each relative to the working directory, else
    to `dataset_dir`. Rows are numbered through all of them."""
    dataset_weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """How often the rows of each file appear in an epoch, 1 where null. Of a fraction, another part every epoch."""
    cutoff_len: Count = 1024
    """Longest sample in tokens, end token included."""
    cutoff: Literal["turns", "drop"] = "turns"
    """What a longer one loses: its last questions with their answers and images until it fits (dropped whole where the
    first one alone does not), or `drop`, all of it. Counted and listed."""
    max_samples: Count | None = None
    """Take only the first rows of all files."""
    on_broken_image: Literal["refuse", "drop"] = "refuse"
    """Drop the rows whose image is missing, broken or of a kind that is refused; counted and listed."""
    on_animated_image: Literal["refuse", "first_frame"] = "refuse"
    train_on_prompt: bool = False
    """Train system texts and questions too: everything but images, padding and an empty thought of the template."""
    mask_history: bool = False
    """Train the last answer of a conversation alone."""
    enable_thinking: bool = True
    """Handed to a chat template that takes it: false marks user turns with `/nothink` as GLM-4.5V does."""
    val_dataset: Name | list[Name] | None = None
    val_max_samples: Count | None = None
    val_rate: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Without `val_dataset`: keep this share of each file's rows, its last, for validation."""
    preprocess_on_fly: bool = False
    """Examine a row when it is drawn: nothing is written, and what is wrong with a row shows only then."""
    streaming: bool = False
    """For files on disk the same as `preprocess_on_fly`."""
    packing: Annotated[bool, _only(False)] = False
    tool_format: Annotated[str | None, _only(None)] = None
    # Nothing below changes what a sample is.
    cache_dir: Name | None = None
    """Where examined samples are kept between runs; null: in a temporary folder, for this process."""
    overwrite_cache: bool = False
    """Build the cache anew at each start."""
    preprocessing_batch_size: Count = 1000
    """Rows examined at a time."""
    preprocessing_num_workers: Annotated[int | None, Field(ge=0)] = None
    """Processes that examine rows; null and 0: the main process. Never more than there are cores, and none where all
    rows are one batch."""

    @model_validator(mode="after")
    def _check(self):
        if self.train_on_prompt and self.mask_history:
            raise ValueError("train_on_prompt and mask_history contradict each other: set one of them to false")
        if self.val_dataset is not None and self.val_rate is not None:
            raise ValueError("val_dataset and val_rate both name a validation set: give one of them")
        if not self.files:
            raise ValueError("dataset names no file")
        if self.dataset_weights is not None and len(self.dataset_weights) != len(self.files):
            raise ValueError(f"dataset_weights: got {len(self.dataset_weights)} weights for {len(self.files)} files")
        return self

    @property
    def files(self) -> list[str]:
        """The names in `dataset`."""
        return _names(self.dataset)

    @property
    def val_files(self) -> list[str]:
        """The names in `val_dataset`."""
        return _names(self.val_dataset or [])


class DatasetParam(StrictModel):
    dataset_type: Name = "huggingface"
    attr: Attributes = Attributes()
    preprocess_parameters: PreprocessParameters
    basic_parameters: BasicParameters


class CollateParam(StrictModel):
    """`collator_id` names the collator; `model_name` is its older spelling."""

    collator_id: Name | None = None
    model_name: Name | None = None
    ignore_pad_token_for_loss: bool = True
    """False trains the pad token at padding; refused where it is also the token that ends an answer."""

    @model_validator(mode="after")
    def _check(self):
        if (self.collator_id is None) == (self.model_name is None):
            given = "both" if self.collator_id else "neither"
            raise ValueError(f"collator_id and model_name (its older name): {given} given, give exactly one")
        return self

    @property
    def collator(self) -> str:
        return self.collator_id or self.model_name


class DataloaderParam(StrictModel):
    """Order, workers and the collator. Batch sizes and the seed come from the command line."""

    dataloader_mode: Literal["sampler"] = "sampler"
    sampler_type: Literal["BaseRandomBatchSampler", "SequentialBatchSampler"] = "BaseRandomBatchSampler"
    shuffle: bool = True
    drop_last: Annotated[bool, _only(True)] = True
    """An incomplete global batch at the end of an epoch is left out; every epoch is shuffled anew."""
    pin_memory: bool = False
    num_workers: Annotated[int, Field(ge=0)] = 0
    enable_preload: bool = False
    """Copy the next micro-batch to the device while this one computes, from pinned memory; neither the order nor the
    position to resume from changes. Without an accelerator it has no effect, which is said."""
    collate_param: CollateParam

    @model_validator(mode="after")
    def _check(self):
        if self.sampler_type == "SequentialBatchSampler" and self.shuffle:
            raise ValueError("sampler_type SequentialBatchSampler does not shuffle; set shuffle to false")
        return self


class DataConfig(StrictModel):
    """data.json as a whole."""

    dataset_param: DatasetParam
    dataloader_param: DataloaderParam

    def check_ids(self) -> None:
        """Refuse what no table has: kind of data set, template, collator."""
        parameters, collate = self.dataset_param, self.dataloader_param.collate_param
        for name, key, id in (
            ("datasets", "dataset_param.dataset_type", parameters.dataset_type),
            ("templates", "dataset_param.basic_parameters.template", parameters.basic_parameters.template),
            ("collators", "dataloader_param.collate_param.collator_id", collate.collator),
        ):
            if id not in table(name):
                raise unknown_name(key, id, table(name).ids())

    def image_bounds(self) -> Bounds:
        """The pixel bounds of a run, the processor's own where none are given. Refused: least above most."""
        preprocess = self.dataset_param.preprocess_parameters
        return used(Path(preprocess.model_name_or_path), Bounds.of(preprocess.model_dump()))


def load_data_config(path: str | Path) -> DataConfig:
    """Read and check data.json."""
    return validate(DataConfig, load_json(path), str(path))
