"""`.pt` files without their bytes: where each tensor lies, what else is inside, and new files at full size to fill.

A `.pt` is a zip whose records are stored, not compressed: a tensor is a plain run of bytes. `scan` reads a file's pickle
with `weights_only=True` under FakeTensorMode, so no data is touched, and `skeleton` writes one whose data are holes, each
tensor on a 4096-byte boundary. The zip's own CRC of such a file is wrong; torch does not look, and ours is in the manifest.

Refused: anything that `weights_only=True` refuses, by its name; of classes only `argparse.Namespace`, which the field's
checkpoints hold, is let in. Tensors that are not contiguous, and legacy (non-zip) files.
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_models.errors import UserError
from mm_models.weights.boxes import Shape
from mm_models.weights.dtypes import dtype_name, torch_dtype

ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor to be: data type and shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Found:
    """A tensor in a file: `path` are the keys that lead to it."""

    path: tuple[str | int, ...]
    dtype: str
    shape: Shape
    offset: int


def skeleton(path: Path, content: Mapping[str, Any]) -> dict[tuple, Found]:
    """Write `content`, in which every `Spec` becomes a tensor of unwritten bytes; returns where the tensors lie."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.serialization import config

    def make(value: Any) -> Any:
        if isinstance(value, Spec):
            return torch.empty(value.shape, dtype=torch_dtype(value.dtype))
        if isinstance(value, Mapping):
            return {key: make(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(make(item) for item in value)
        return value

    with FakeTensorMode(), config.patch("save.storage_alignment", ALIGNMENT):
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(make(content), path)
    return scan(path)[1]


def scan(path: Path) -> tuple[Any, dict[tuple, Found]]:
    """(content, tensors by key path) of a file. In the content every tensor is a `Spec`; no tensor data are read."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    content = _load(path, fake=FakeTensorMode())
    found: dict[tuple, Found] = {}

    def walk(value: Any, at: tuple) -> Any:
        if isinstance(value, torch.Tensor):
            shape, dtype = tuple(value.shape), dtype_name(value.dtype)
            if not value.is_contiguous():
                raise UserError(
                    f"{path}: tensor {_dotted(at)} is not contiguous (shape {shape}, strides {value.stride()}). Save a contiguous copy."
                )
            start = value.untyped_storage()._checkpoint_offset
            if start is None:  # torch leaves it out for tensors without elements
                start = 0
            found[at] = Found(
                path=at, dtype=dtype, shape=shape, offset=start + value.storage_offset() * value.element_size()
            )
            return Spec(dtype=dtype, shape=shape)
        if isinstance(value, Mapping):
            return {key: walk(item, (*at, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return (
                type(value)(walk(item, (*at, i)) for i, item in enumerate(value))
                if type(value) in (list, tuple)
                else value
            )
        return value

    return walk(content, ()), found


def load(path: Path) -> Any:
    """A file with its data, `weights_only=True`, `argparse.Namespace` let in."""
    return _load(path, fake=None)


def _load(path: Path, fake) -> Any:
    import contextlib

    import torch

    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not a zip-format .pt file (cut short, or saved in torch's format before 1.6).")
    try:
        with fake or contextlib.nullcontext(), torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, weights_only=True, map_location=None if fake else "cpu")
    except Exception as error:
        text = re.sub(r"\x1b\[\d*m", "", str(error))
        name = re.search(r"(?:GLOBAL|global|class) ([\w.]+)", text.partition("WeightsUnpickler error:")[2] or text)
        what = f"it holds {name.group(1)}, which is not data" if name else text.splitlines()[0]
        raise UserError(
            f"{path}: cannot be read as plain tensors and data: {what}. Only argparse.Namespace is let in beside torch's own types."
        ) from error


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))
