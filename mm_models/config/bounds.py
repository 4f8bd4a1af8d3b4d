"""How many pixels an image may have: the bounds of data.json over those of a Hugging Face folder, and back into such a folder.

Bounds count the pixels of one image (height x width after resizing). An image processor has them under `size`, and older files
of Qwen under `min_pixels` and `max_pixels`, which win where both stand. GLM's counts frames in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_models.config.strict import load_json
from mm_models.errors import UserError, unknown_name

FILES = ("processor_config.json", "preprocessor_config.json")
"""Where an image processor's settings may stand, first hit wins."""
CLASS_FILES = (*FILES, "tokenizer_config.json")
"""Where `processor_class` may stand, first hit wins."""

FRAMES_IN_SIZE = {"Glm4vProcessor": True, "Qwen2VLProcessor": False, "Qwen2_5_VLProcessor": False}
"""Processor class -> whether `size` bounds frames x height x width, with a still image counted as `temporal_patch_size` frames;
without, height x width alone."""

EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""An image processor's least and most pixels under `size`, and their older names."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least and most pixels of one resized image; None where nobody says it."""

    least: int | None = None
    most: int | None = None

    @staticmethod
    def of(said: Mapping[str, Any]) -> Bounds:
        """The bounds among the keys of `preprocess_parameters`, or of a checkpoint's record."""
        return Bounds(least=said.get("image_min_pixels"), most=said.get("image_max_pixels"))

    def record(self) -> dict[str, int]:
        """What `of` reads again."""
        both = {"image_min_pixels": self.least, "image_max_pixels": self.most}
        return {name: value for name, value in both.items() if value is not None}

    def over(self, other: Bounds) -> Bounds:
        """These, and what is not said here from `other`."""
        return Bounds(
            least=other.least if self.least is None else self.least, most=other.most if self.most is None else self.most
        )

    def __str__(self) -> str:
        return f"{'?' if self.least is None else self.least} to {'?' if self.most is None else self.most} pixels"


UNSAID = Bounds()


def merged(own: Mapping[str, int | None], given: Bounds, unit: int, where: object) -> dict[str, int]:
    """The `size` of an image processor: its own edges, those replaced that `given` says; `unit` is what a pixel counts.

    Refused: an edge that nobody says, least above most.
    """
    size = dict(own) | {
        edge: unit * value for edge, value in zip(EDGES, (given.least, given.most), strict=True) if value is not None
    }
    if None in size.values():
        raise UserError(f"{where}: the image processor's size has no {' and '.join(EDGES)}; got {dict(own)}.")
    if size["shortest_edge"] > size["longest_edge"]:
        raise UserError(
            f"{where}: image_min_pixels {size['shortest_edge'] // unit} exceeds image_max_pixels "
            f"{size['longest_edge'] // unit} (a bound not given is the folder's own)."
        )
    size["shortest_edge"] = max(size["shortest_edge"], 1)  # 0 means no bound; the processor refuses a zero
    return size


def processor_class(folder: Path) -> str:
    """The class of a folder's processor, one of `FRAMES_IN_SIZE`."""
    for name in CLASS_FILES:
        if (folder / name).is_file() and (found := load_json(folder / name).get("processor_class")) is not None:
            if found not in FRAMES_IN_SIZE:
                raise unknown_name("processor_class", found, FRAMES_IN_SIZE, where=str(folder / name))
            return found
    known = ", ".join(FRAMES_IN_SIZE)
    raise UserError(f"{folder}: none of {', '.join(CLASS_FILES)} names a processor_class. Known: {known}.")


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a folder says of its image processor, in `file` (None: nothing): its edges in its own count, `unit` of which a pixel
    is, and whether older names count."""

    folder: Path
    file: str | None = None
    edges: Mapping[str, int | None] = field(default_factory=lambda: dict.fromkeys(EDGES))
    unit: int = 1
    older_wins: bool = False

    @staticmethod
    def of(folder: Path) -> Stated:
        for name in FILES:
            if (folder / name).is_file() and (found := _settings(name, load_json(folder / name))) is not None:
                frames = FRAMES_IN_SIZE[processor_class(folder)]
                unit = found.get("temporal_patch_size", 2) if frames else 1
                read, size = _read(found, not frames), found.get("size") or {}
                edges = {edge: size.get(older) if read[edge] is None else read[edge] for edge, older in EDGES.items()}
                return Stated(folder=folder, file=name, edges=edges, unit=unit, older_wins=not frames)
        return Stated(folder=folder)

    @property
    def bounds(self) -> Bounds:
        least, most = (value if value is None else value // self.unit for value in self.edges.values())
        return Bounds(least=least, most=most)

    def writer(self, given: Bounds) -> Callable[[str, dict[str, Any]], None]:
        """What puts `given` into the content of a file of the folder, by the file's name; into none that says it already."""
        same = given.over(self.bounds) == self.bounds
        size = self.edges if same else merged(self.edges, given, self.unit, self.folder)
        size = {edge: value for edge, value in size.items() if value is not None}

        def change(name: str, content: dict[str, Any]) -> None:
            settings = _settings(name, content)
            if settings is None or size.items() <= _read(settings, self.older_wins).items():
                return
            settings["size"] = size
            settings.update({older: size[edge] for edge, older in EDGES.items() if older in settings and edge in size})

        return change


def used(folder: Path, given: Bounds) -> Bounds:
    """The bounds of a run: those given, else the folder's. Refused: least above most."""
    stated = Stated.of(folder)
    both = given.over(stated.bounds)
    if None not in (both.least, both.most):
        merged(stated.edges, given, stated.unit, folder)
    return both


def _settings(name: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """The image processor's settings in the content of the file `name`."""
    if name == FILES[0]:
        return content.get("image_processor")
    return content if name == FILES[1] else None


def _read(settings: Mapping[str, Any], older_wins: bool) -> dict[str, int | None]:
    """The edges that transformers reads; for older names under `size` it has no use."""
    size = settings.get("size") or {}
    return {
        edge: settings[older] if older_wins and settings.get(older) is not None else size.get(edge)
        for edge, older in EDGES.items()
    }
