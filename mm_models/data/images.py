"""Images of a sample: what a row says, where the path leads, what the header says, and the RGB pixels.

A row names an image by its path, as `{"path": ...}`, or holds the encoded file itself: `{"bytes": ...}` (bytes in
Parquet, base64 in JSON) or a `data:` address. A picture is turned by its EXIF orientation and converted to RGB, exactly
as `transformers.image_utils.load_image` does, so that the Hugging Face processor sees the same pixels.

Refused, with the name: addresses on a network, and, as an `ImageFault`, missing files, files PIL cannot read, truncated
ones, animations unless the first frame is asked for, and the modes that PIL would clip on the way to RGB (16-bit,
32-bit and float greys).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from mm_models.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION_TAG = 0x0112
TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
DEEP_MODES = ("I", "F")
"""PIL modes (and the prefixes of `I;16` and its kin) that `convert("RGB")` would clip."""
ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/]*)/?(?P<path>.*)", re.DOTALL)
COLUMNS = {"path", "bytes"}
"""Keys of an image written as an object: those of Hugging Face's Image feature."""


class ImageFault(UserError):
    """An image that cannot be used. `kind` says why in two words, the same for all images of that kind."""

    def __init__(self, message: str, *, kind: str = "broken image"):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageBytes:
    """An image file that the row itself holds."""

    data: bytes
    name: str = "bytes"
    """What messages call it."""

    def __str__(self) -> str:
        return f"{self.name}, {len(self.data)} bytes"


def fault(source: Path | ImageBytes, reason: str, **kind: str) -> ImageFault:
    """The error about one image."""
    name = str(source)
    shown = name if len(name) < 500 else f"{name[:500]}..."
    return ImageFault(f"image {shown!r}: {reason}", **kind)


def parse(value: Any) -> str | ImageBytes:
    """An image as a row writes it: a path, or the file's bytes. Raises UserError with the reason alone."""
    if isinstance(value, bytes):
        return ImageBytes(data=value)
    if isinstance(value, str) and value[:5].lower() == "data:":
        head, comma, text = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise UserError(f"image {value[:40]!r}: a data: address without base64 content")
        return ImageBytes(data=_base64(text, head), name=head)
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, dict) or not value.keys() <= COLUMNS:
        raise UserError(f"image {value!r:.60}: expected a path, {{'path': ...}} or {{'bytes': ...}}")
    data, path = value.get("bytes"), value.get("path")
    name = path if isinstance(path, str) and path else "bytes"
    if isinstance(data, str):
        return ImageBytes(data=_base64(data, name), name=name)
    if isinstance(data, bytes):
        return ImageBytes(data=data, name=name)
    if data is not None or name == "bytes":
        raise UserError(f"image {value!r:.60}: neither a path nor bytes")
    return path


def resolve(reference: str | ImageBytes, base: str | os.PathLike[str]) -> Path | ImageBytes:
    """The file an image reference names: absolute, `file://` (percent-encoded) or relative to `base`; bytes are kept.

    Any other scheme (`http://` ...) is refused. Existence is checked later, by `inspect`.
    """
    if isinstance(reference, ImageBytes):
        return reference
    address = ADDRESS.match(reference)
    if address is None:
        return Path(base, reference)
    if address["scheme"].lower() != "file":
        raise UserError(
            f"image {reference!r}: got a {address['scheme']}:// address, expected a path. Download the file first."
        )
    if address["host"].lower() not in ("", "localhost"):
        raise UserError(
            f"image {reference!r}: got the host {address['host']!r}, expected file:///path or a plain path."
        )
    return Path("/", unquote(address["path"]))


def inspect(source: Path | ImageBytes, *, decode: bool, first_frame: bool = False) -> tuple[int, int]:
    """(height, width) in pixels after the EXIF turn. `first_frame` accepts an animation for the sake of it.

    With `decode` the file is decoded once, at the lowest resolution its format offers, so that a truncated one is
    found before training. Without, the header is enough for most formats (PIL decodes a PNG that may hold EXIF last).
    """
    with _open(source) as image:
        frames = _read(source, lambda: getattr(image, "n_frames", 1))
        if frames > 1 and image.format != "MPO" and not first_frame:  # MPO: a phone's JPEG with a second view after it
            hint = "give one frame as a file of its own, or set on_animated_image to first_frame"
            raise fault(source, f"{frames} frames; {hint}.", kind="animated image")
        width, height = image.size
        if decode:
            _read(source, lambda: image.draft("RGB", (1, 1)))
            _read(source, image.load)
        turned = _read(source, image.getexif).get(ORIENTATION_TAG) in TURNED
        return (width, height) if turned else (height, width)


def load_rgb(source: Path | ImageBytes) -> Image:
    """The picture as Hugging Face would load it: first frame, EXIF-turned, mode RGB. `inspect` has accepted it."""
    from PIL import ImageOps

    with _open(source) as image:
        _read(source, image.load)
        _read(source, lambda: ImageOps.exif_transpose(image, in_place=True))
        return image if image.mode == "RGB" else image.convert("RGB")  # either would copy a picture that needs nothing


def _open(source: Path | ImageBytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, ImageBytes):
        file = io.BytesIO(source.data)
    else:
        _check_file(source)
        file = source
    try:
        image = Image.open(file)
    except UnidentifiedImageError as error:
        raise fault(source, "not a readable image; PIL knows no such format.") from error
    except Exception as error:  # on a broken file PIL's readers raise whatever they run into
        raise fault(source, f"not a readable image ({error}).") from error
    if image.mode.split(";")[0] in DEEP_MODES:
        image.close()
        detail = f"mode {image.mode} holds more than 8 bits per channel; convert it to 8-bit RGB first."
        raise fault(source, detail, kind="deep image")
    return image


def _check_file(path: Path) -> None:
    try:
        if path.is_file():
            return
        reason = "a folder, not a file." if path.is_dir() else "no such file. Image paths are relative to dataset_dir."
    except OSError as error:  # a name too long, a folder that may not be read
        reason = f"{error.strerror}."
    raise fault(path, reason, kind="missing image")


def _read(source: Path | ImageBytes, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # as in _open
        raise fault(source, f"broken or truncated ({error}).") from error


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"image {name!r}: its bytes are not base64 text ({error})") from error
