"""What the server of `fresh` imports. None of these starts work of its own; the backend of a device stays out."""

from __future__ import annotations

import os

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of the server and its processes, which use no device

import datasets  # noqa: F401
import transformers  # noqa: F401

import mm_models.data.loader
import mm_models.data.preprocess  # noqa: F401
from mm_models.data.processor import KINDS, named

for kind in KINDS.values():
    named(kind.processor), named(kind.image_processor)
