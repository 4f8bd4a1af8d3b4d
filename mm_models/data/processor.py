"""The Hugging Face processor of a model folder, assembled without torchvision.

`AutoProcessor` of transformers 5 asks for a video processor, which needs torchvision, even where no video is in sight.
`load_processor` builds the stock processor class from the folder's tokenizer, chat template and image processor (always
the PIL one, so that every machine makes the same pixels). Both layouts load: `processor_config.json` (5.x) and
`preprocessor_config.json` with the template in `chat_template.jinja`, `chat_template.json` or the tokenizer's files.

Image bounds are given in pixels of one image (height x width after resizing); how a processor counts them is known to
`config.bounds`. Refused: a folder without processor, tokenizer or template, an unknown processor class, contradicting bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mm_models import versions
from mm_models.config.bounds import EDGES, FRAMES_IN_SIZE, Bounds, merged, processor_class
from mm_models.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorKind:
    """One family: its processor and PIL image processor ("module:class"), its resize rule ("module:function"), and the
    attributes the processor takes from tokens."""

    processor: str
    image_processor: str
    smart_resize: str
    image_token: str
    video_token: str
    token_ids: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further attributes that hold the id of a token."""

    @property
    def frames_in_size(self) -> bool:
        return FRAMES_IN_SIZE[self.processor.split(":")[1]]


def _qwen(processor: str) -> ProcessorKind:
    return ProcessorKind(
        processor=processor,
        image_processor="transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        smart_resize="transformers.models.qwen2_vl.image_processing_pil_qwen2_vl:smart_resize",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )


KINDS = {
    "Glm4vProcessor": ProcessorKind(
        processor="transformers.models.glm4v.processing_glm4v:Glm4vProcessor",
        image_processor="transformers.models.glm4v.image_processing_pil_glm4v:Glm4vImageProcessorPil",
        smart_resize="transformers.models.glm4v.image_processing_pil_glm4v:smart_resize",
        image_token="<|image|>",
        video_token="<|video|>",
        token_ids={"video_start_id": "<|begin_of_video|>", "video_end_id": "<|end_of_video|>"},
    ),
    "Qwen2VLProcessor": _qwen("transformers.models.qwen2_vl.processing_qwen2_vl:Qwen2VLProcessor"),
    "Qwen2_5_VLProcessor": _qwen("transformers.models.qwen2_5_vl.processing_qwen2_5_vl:Qwen2_5_VLProcessor"),
}


def load_processor(
    folder: str | Path, *, image_min_pixels: int | None = None, image_max_pixels: int | None = None
) -> Any:
    """The stock processor (`type(p).__name__ == "Glm4vProcessor"`) of a local folder; no network is used.

    The bounds, where given, replace the folder's own and are saved with the processor by `save_pretrained`.
    """
    versions.check("transformers")
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"model_name_or_path {str(folder)!r}: no such folder ({folder.absolute()}). Give a local Hugging Face folder."
        )
    kind = KINDS[processor_class(folder)]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{folder}: no tokenizer.json; copy the tokenizer's files of the model into the folder.")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    image_processor = named(kind.image_processor).from_pretrained(folder, local_files_only=True)
    _set_bounds(image_processor, kind, image_min_pixels, image_max_pixels, folder)
    return _without_video(kind)(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=_chat_template(folder, tokenizer)
    )


def image_grid(processor: Any, height: int, width: int) -> tuple[int, int, int]:
    """(1, rows, columns) of patches the image processor will make of an image, from its size alone.

    Raises ValueError where the processor would refuse the shape (aspect ratio above 200).
    """
    return grid_rule(processor)(height, width)


def grid_rule(processor: Any) -> Callable[[int, int], tuple[int, int, int]]:
    """`image_grid` of this processor, to be pickled, which the processor itself cannot be."""
    return functools.partial(_grid, KINDS[type(processor).__name__], processor.image_processor)


def _grid(kind: ProcessorKind, images: Any, height: int, width: int) -> tuple[int, int, int]:
    unit = images.temporal_patch_size
    frames = {"num_frames": unit, "temporal_factor": unit} if kind.frames_in_size else {}
    resized = named(kind.smart_resize)(
        **frames,
        height=height,
        width=width,
        factor=images.patch_size * images.merge_size,
        min_pixels=images.size["shortest_edge"],
        max_pixels=images.size["longest_edge"],
    )
    return (1, resized[0] // images.patch_size, resized[1] // images.patch_size)


def pixel_bounds(processor: Any) -> tuple[int, int]:
    """(least, most) pixels of one resized image."""
    images, kind = processor.image_processor, KINDS[type(processor).__name__]
    unit = images.temporal_patch_size if kind.frames_in_size else 1
    return images.size["shortest_edge"] // unit, images.size["longest_edge"] // unit


def _set_bounds(images: Any, kind: ProcessorKind, least: int | None, most: int | None, folder: Path) -> None:
    unit = images.temporal_patch_size if kind.frames_in_size else 1
    found = images.size
    own = {edge: found[older] if found[edge] is None else found[edge] for edge, older in EDGES.items()}
    images.size = type(found)(**merged(own, Bounds(least=least, most=most), unit, folder))


def _chat_template(folder: Path, tokenizer: Any) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (folder / "chat_template.json").is_file():
        return json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    if isinstance(tokenizer.chat_template, str):
        return tokenizer.chat_template
    raise UserError(
        f"{folder}: no chat template; expected chat_template.jinja, chat_template.json or one in tokenizer_config.json."
    )


def named(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(module), attribute)


def _without_video(kind: ProcessorKind) -> type:
    """A subclass of the stock processor that neither has nor asks for a video processor, and saves under the stock
    name.

    Transformers reads a processor's parts from the parameter names of `__init__`: without `video_processor` there is
    none.
    """
    stock = named(kind.processor)

    class ImageOnlyProcessor(stock):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
            from transformers.processing_utils import ProcessorMixin

            token_id = tokenizer.convert_tokens_to_ids
            self.image_token, self.video_token = kind.image_token, kind.video_token
            self.image_token_id, self.video_token_id = token_id(kind.image_token), token_id(kind.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template, **kwargs)
            for name, token in kind.token_ids.items():
                setattr(self, name, token_id(token))

    ImageOnlyProcessor.__name__ = ImageOnlyProcessor.__qualname__ = stock.__name__
    return ImageOnlyProcessor
