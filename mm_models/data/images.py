"""Images of a sample: where the path leads, what the header says, and the RGB pixels.

A picture is turned by its EXIF orientation and converted to RGB, exactly as `transformers.image_utils.load_image`
does, so that the Hugging Face processor sees the same pixels. Refused, with the path: URLs, missing files, files PIL
cannot read, truncated files, animations, and modes whose RGB conversion would lose depth (16-bit, 32-bit, float).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mm_models.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION_TAG = 0x0112
TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
DEEP_MODES = ("I", "F")
"""PIL modes (and the prefixes of `I;16` and its kin) that `convert("RGB")` would clip."""


def resolve(reference: str, base: str | os.PathLike[str]) -> Path:
    """The file an image reference names: absolute, `file://` (percent-encoded) or relative to `base`.

    Any other scheme (`http://` ...) is refused. Existence is checked later, by `inspect`.
    """
    scheme = urlsplit(reference).scheme if "://" in reference else ""
    if scheme == "file":
        return Path(unquote(urlsplit(reference).path))
    if scheme:
        raise UserError(f"image {reference!r}: got a {scheme}:// address, expected a path. Download the file first.")
    return Path(base, reference)


def inspect(path: Path, *, decode: bool) -> tuple[int, int]:
    """(height, width) in pixels after the EXIF turn.

    With `decode` the file is decoded once, at the lowest resolution its format offers, so that a truncated one is
    found before training. Without, the header is enough for most formats (PIL decodes a PNG that may hold EXIF last).
    """
    with _open(path) as image:
        width, height = image.size
        if decode:
            image.draft("RGB", (1, 1))
            _decode(path, image.load)
        turned = _decode(path, image.getexif).get(ORIENTATION_TAG) in TURNED
        return (width, height) if turned else (height, width)


def load_rgb(path: Path) -> Image:
    """The picture as Hugging Face would load it: EXIF-turned, mode RGB."""
    from PIL import ImageOps

    with _open(path) as image:
        _decode(path, image.load)
        return ImageOps.exif_transpose(image).convert("RGB")


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise UserError(f"image {str(path)!r}: no such file. Image paths are relative to dataset_dir.")
    try:
        image = Image.open(path)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise UserError(f"image {str(path)!r}: not a readable image ({error})") from error
    problem = None
    if image.mode.split(";")[0] in DEEP_MODES:
        problem = f"mode {image.mode} holds more than 8 bits per channel; convert it to 8-bit RGB first"
    elif getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a phone's JPEG with a second view after it
        problem = f"{image.n_frames} frames; animations are not supported, give one frame as a file of its own"
    if problem:
        image.close()
        raise UserError(f"image {str(path)!r}: {problem}.")
    return image


def _decode(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"image {str(path)!r}: broken or truncated ({error})") from error
