"""Data types by one name, the safetensors one ("BF16", "F32", ...), and what torch calls them. Importing this loads no torch."""

from __future__ import annotations

from mm_models.errors import UserError

ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16",
    "U32": "uint32", "U64": "uint64",
}  # fmt: skip


def itemsize(dtype: str, where: str = "") -> int:
    """Bytes of one element; an unknown data type is refused."""
    if dtype not in ITEMSIZE:
        raise UserError(f"{where}: data type {dtype!r} is not supported. Known: {', '.join(ITEMSIZE)}.")
    return ITEMSIZE[dtype]


def torch_dtype(dtype: str):
    """The torch dtype of a name."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype])


def dtype_name(dtype) -> str:
    """The name of a torch dtype."""
    plain = str(dtype).removeprefix("torch.")
    for name, torch_name in TORCH_NAMES.items():
        if torch_name == plain:
            return name
    raise UserError(f"data type {dtype} is not supported. Known: {', '.join(TORCH_NAMES.values())}.")
