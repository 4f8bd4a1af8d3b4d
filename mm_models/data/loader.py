"""`build_loader`: from data.json to the micro-batches of one data-parallel rank.

Ranks of one model-parallel group pass the same arguments, `needs` apart, and get the same sample ids. The order does
not depend on `num_workers`; a sample that a worker has prepared but no step has used is prepared again after a resume.
Workers are started fresh (see `fresh`), never forked from a process that runs torch threads. What goes wrong in one is
raised in the main process as what it is, with the rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mm_models.config.data import DataConfig
from mm_models.config.model import ModelConfig
from mm_models.data.collator import NEEDS, Batch
from mm_models.data.examine import make_processor, make_template
from mm_models.data.fresh import forkserver
from mm_models.data.parcel import Parcel
from mm_models.data.preload import preloaded
from mm_models.data.processor import pixel_bounds
from mm_models.data.report import Report
from mm_models.data.sample import Sample, SampleError
from mm_models.data.sampler import SAMPLERS, BaseRandomBatchSampler
from mm_models.errors import UserError
from mm_models.registry import load_plugins, loaded_plugins, table


class Loader:
    """Endless micro-batches; `len` is the number of this rank's micro-batches in one epoch.

    Each `iter` starts again at the `consumed_samples` the loader was built with: take it once.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        sampler: BaseRandomBatchSampler,
        collator: Any,
        processor: Any,
        template: Any,
        workers: int,
        pin: bool,
        preload: bool,
        images: bool,
    ):
        """`images`: whether the model takes any."""
        self.dataset, self.sampler, self.collator = dataset, sampler, collator
        self.processor, self.template = processor, template
        self._workers, self._preload, self._images = workers, preload, images
        self._device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._pin = (pin or preload) and self._device is not None

    @property
    def report(self) -> Report:
        """What became of the rows; print `report.lines()` once per run."""
        return self.dataset.report

    def summary(self) -> str:
        """Samples and order in one line: the same on ranks and in runs that have the same."""
        return f"{self.report.summary()}, {self.sampler.rule}"

    def lines(self) -> list[str]:
        """The report and the settings that shape samples, for the start of a run."""
        least, most = pixel_bounds(self.processor)
        tail = self.sampler.total - self.sampler.samples_per_epoch
        note = (
            ["data enable_preload has no effect without an accelerator"] if self._preload and not self._device else []
        )
        return [
            *self.report.lines(),
            *note,
            f"data images: {least} to {most} pixels after resizing",
            f"data template: {self.template.name}; its tokens are special, text of a sample never becomes one",
            f"data order: {len(self.sampler)} micro-batches per epoch and rank; "
            f"{tail} samples are left out at the end of each epoch",
        ]

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches()
        return preloaded(batches, self._device) if self._preload and self._device is not None else batches

    def _batches(self) -> Iterator[Batch]:
        workers = {"num_workers": self._workers, "multiprocessing_context": forkserver()} if self._workers else {}
        loader = DataLoader(
            _Batches(self.dataset, self.collator, images=self._images),
            sampler=self.sampler,
            batch_size=None,  # the sampler gives whole micro-batches
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            generator=torch.Generator(),  # its own: the loader must not draw from the training's generator
            **workers,
        )
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except (RuntimeError, EOFError, OSError) as error:
                if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
                    raise
                raise UserError(
                    f"a worker process of the loader died ({error!r}). When memory ran out, or /dev/shm, lower "
                    f"dataloader_param.num_workers (now {self._workers})."
                ) from error
            if isinstance(batch, _Refused):
                raise UserError(str(batch))
            yield batch.open() if isinstance(batch, Parcel) else batch


class _Refused(str):
    """The text of a UserError on its way out of a worker."""


class _Batches(Dataset):
    """Micro-batches by their list of indices."""

    def __init__(self, dataset: Any, collator: Any, *, images: bool):
        self._dataset, self._collator, self._images = dataset, collator, images

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker, plugins come before what may be of their making."""
        return _with_plugins, (loaded_plugins(), pickle.dumps((self._dataset, self._collator, self._images)))

    def __getitem__(self, indices: list[int]) -> Batch | Parcel | _Refused:
        samples = []
        try:
            samples += [self._dataset[index] for index in indices]
            if not self._images:
                _refuse_images(samples)
            batch = self._collator(samples)
            return batch if get_worker_info() is None else Parcel(batch)
        except SampleError as error:
            return _Refused(f"{self._dataset.report.places.name(error.row)}, {error.reason}")
        except UserError as error:
            return _Refused(error)
        except Exception as error:
            rows = ", ".join(str(sample.id) for sample in samples) or f"of indices {indices}"
            raise RuntimeError(f"preparing rows {rows} failed: {error!r}") from error


def _with_plugins(plugins: list[str], parts: bytes) -> _Batches:
    load_plugins(plugin for plugin in plugins if plugin not in loaded_plugins())
    dataset, collator, images = pickle.loads(parts)
    return _Batches(dataset, collator, images=images)


def _refuse_images(samples: list[Sample]) -> None:
    for sample in samples:
        if sample.images:
            raise SampleError(sample.id, "an image, and the model has no image_encoder.")


def _as_it_is(batch: Any) -> Any:
    return batch


def build_loader(
    data_config: DataConfig,
    *,
    split: str = "train",
    model_config: ModelConfig,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_batch_size: int = 1,
    global_batch_size: int = 1,
    seed: int = 1234,
    consumed_samples: int = 0,
    needs: frozenset[str] = NEEDS,
    pad_to_multiple_of: int = 1,
) -> Loader:
    """The loader of one data-parallel rank. `split` is `train`, or `valid` (in file order).

    Raises UserError, before any step, for everything data.json, the data or the folder have wrong, and for a processor
    that does not belong to the model.
    """
    parameters, options = data_config.dataset_param, data_config.dataloader_param
    data_config.check_ids()
    dataset_class = table("datasets").get(parameters.dataset_type)
    collator_class = table("collators").get(options.collate_param.collator)
    positions = table("positions").get(model_config.text.model_id) if model_config.text else None
    processor = make_processor(data_config)
    check_model(processor, model_config)
    template = make_template(data_config, processor)
    dataset = dataset_class(data_config, processor, template, split=split, decode="pixels" in needs)
    if dataset.report.images and model_config.vision is None:
        raise UserError(
            f"{dataset.report.places.title} holds {dataset.report.images} images, the model has no image_encoder."
        )
    weights = parameters.basic_parameters.dataset_weights if split == "train" else None
    sampler = SAMPLERS[options.sampler_type](
        len(dataset),
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        shuffle=options.shuffle and split == "train",
        consumed_samples=consumed_samples,
        parts=list(zip(dataset.sizes, weights, strict=True)) if weights else None,
    )
    collator = collator_class(
        processor=processor,
        positions=positions,
        needs=needs,
        pad_to_multiple_of=pad_to_multiple_of,
        train_on_pads=not options.collate_param.ignore_pad_token_for_loss,
    )
    return Loader(
        dataset=dataset,
        sampler=sampler,
        collator=collator,
        processor=processor,
        template=template,
        workers=options.num_workers if "pixels" in needs else 0,  # nothing else is worth a process
        pin=options.pin_memory,
        preload=options.enable_preload,
        images=model_config.vision is not None,
    )


def check_model(processor: Any, model: ModelConfig) -> None:
    """Refuse a processor of another model: image token, vocabulary, patch and merge sizes must agree."""
    images, tokenizer, vision = processor.image_processor, processor.tokenizer, model.vision
    pairs = [("img_context_token_id", model.img_context_token_id, "image token id", processor.image_token_id)]
    if vision:
        pairs += [
            (f"vision_encoder.{ours}", getattr(vision, ours), theirs, getattr(images, theirs))
            for ours, theirs in (
                ("patch_size", "patch_size"),
                ("temporal_patch_size", "temporal_patch_size"),
                ("spatial_merge_size", "merge_size"),
            )
        ]
    wrong = [
        f"model {ours} {got}, processor {theirs} {found}"
        for ours, got, theirs, found in pairs
        if got is not None and got != found
    ]
    if model.text and len(tokenizer) > model.text.vocab_size:
        wrong.append(
            f"model text_decoder.vocab_size {model.text.vocab_size}, the tokenizer has {len(tokenizer)} tokens"
        )
    if tokenizer.pad_token_id is None:
        wrong.append("the tokenizer has no pad token")
    if wrong:
        raise UserError(
            f"model.json and the processor of {tokenizer.name_or_path!r} do not belong together: {'; '.join(wrong)}."
        )
