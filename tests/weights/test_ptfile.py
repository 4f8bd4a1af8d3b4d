"""`.pt` files written without torch are what torch.save would have written; files torch wrote are read without torch."""

from __future__ import annotations

import argparse
import os
import random
import zipfile
import zlib

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mm_models.errors import UserError
from mm_models.weights import ptfile
from mm_models.weights.boxes import volume
from mm_models.weights.dtypes import ITEMSIZE, TORCH_NAMES, dtype_name, torch_dtype
from mm_models.weights.ptfile import Spec
from mm_models.weights.ptwriter import STORAGES

PLAIN = {
    "none": None, "yes": True, "no": False, "small": 7, "negative": -3, "big": 1 << 40, "huge": -(1 << 70), "real": 0.1,
    "text": "ümlaut", "list": [1, [2.5, None]], "tuple": (1, "a", (True,)), "empty": [(), [], {}], "nested": {"a": {"b": 1}}, 3: "int key",
}  # fmt: skip


def fill(path, found):
    """Write random bytes where the tensors lie; the tensors as torch sees them."""
    generator, crcs, expected = np.random.default_rng(0), [], {}
    with path.open("r+b") as file:
        for key, tensor in found.items():
            data = generator.integers(
                0, 2 if tensor.dtype == "BOOL" else 100, volume(tensor.shape) * ITEMSIZE[tensor.dtype], np.uint8
            ).tobytes()
            os.pwrite(file.fileno(), data, tensor.offset)
            crcs.append((tensor, zlib.crc32(data)))
            expected[key] = torch.frombuffer(bytearray(data), dtype=torch_dtype(tensor.dtype)).reshape(tensor.shape)
    ptfile.seal(path, crcs)
    return expected


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "model_optim_rng.pt"
    tensors = {f"t_{dtype}": Spec(dtype=dtype, shape=(3, 5)) for dtype in STORAGES}
    tensors |= {"vector": Spec(dtype="F32", shape=(7,)), "conv": Spec(dtype="BF16", shape=(4, 3, 2, 2, 2))}
    found = ptfile.skeleton(path, {"model": tensors, "both": [Spec(dtype="F32", shape=(2,))]} | PLAIN)
    return path, found, fill(path, found)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_written(written, mmap):
    path, _, expected = written
    content = torch.load(path, weights_only=True, mmap=mmap)
    assert {key: value for key, value in content.items() if key in PLAIN} == PLAIN
    for key, tensor in expected.items():
        got = content[key[0]][key[1]]
        assert got.dtype == tensor.dtype and torch.equal(got, tensor) and got.is_contiguous(), key


def test_offsets_are_those_torch_finds_and_aligned(written):
    path, found, _ = written
    with FakeTensorMode():
        content = torch.load(path, weights_only=True)
    for key, tensor in found.items():
        assert content[key[0]][key[1]].untyped_storage()._checkpoint_offset == tensor.offset
        assert tensor.offset % 4096 == 0


def test_a_sealed_file_is_a_valid_zip(written):
    path = written[0]
    assert zipfile.ZipFile(path).testzip() is None


def test_scan_reads_back_what_was_written(written):
    path, found, _ = written
    content, again = ptfile.scan(path)
    assert {key: value for key, value in content.items() if key in PLAIN} == PLAIN
    assert {k: (f.dtype, f.shape, f.offset) for k, f in again.items()} == {
        k: (f.dtype, f.shape, f.offset) for k, f in found.items()
    }


def test_files_beyond_four_gigabytes(tmp_path):
    """Sizes and offsets that need the zip64 fields; the file is all holes."""
    path = tmp_path / "large.pt"
    found = ptfile.skeleton(path, {"a": Spec(dtype="BF16", shape=(3 << 20, 1024)), "b": Spec(dtype="F32", shape=(5,))})
    assert found["b",].offset > 1 << 32
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), torch.arange(5.0).numpy().tobytes(), found["b",].offset)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["a"].shape == (3 << 20, 1024) and loaded["b"].tolist() == [0, 1, 2, 3, 4]
    assert ptfile.scan(path)[1]["b",].offset == found["b",].offset


def test_scan_reads_what_torch_saved(tmp_path):
    path, whole = tmp_path / "t.pt", torch.randn(10, 6)
    content = {
        "whole": whole, "rows": whole[2:5], "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "args": argparse.Namespace(lr=0.1, names=["a"]), "rng": [random.Random(0).getstate(), torch.get_rng_state()],
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "bytes": b"\x00\xff", "set": {1, 2},
        "half": torch.ones(2, dtype=torch.float16),
    }  # fmt: skip
    torch.save(content, path)
    read, found = ptfile.scan(path)
    assert read["args"] == content["args"] and read["rng"][0] == content["rng"][0] and read["size"] == (2, 3)
    assert read["bytes"] == content["bytes"] and read["set"] == {1, 2} and read["dtype"] == "BF16"
    raw = path.read_bytes()
    for key in ("whole", "rows", "parameter", "scalar", "half"):
        tensor, where = content[key], found[key,]
        assert where.shape == tuple(tensor.shape) and where.dtype == dtype_name(tensor.dtype)
        data = torch.frombuffer(bytearray(raw[where.offset : where.offset + tensor.nbytes]), dtype=tensor.dtype)
        assert torch.equal(data.reshape(tensor.shape), tensor.detach()), key


class Danger:
    def __reduce__(self):
        return os.system, ("echo run",)


def test_anything_that_is_not_data_is_refused_by_name(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"model": {}, "bad": Danger()}, path)
    with pytest.raises(UserError, match=r"t\.pt: holds posix\.system, which is not plain data"):
        ptfile.scan(path)
    torch.save({"rng": np.random.get_state()}, path)
    with pytest.raises(UserError, match="holds numpy"):
        ptfile.scan(path)


def test_unusable_files_are_refused(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"a": torch.randn(4, 6).t()}, path)
    with pytest.raises(UserError, match=r"tensor a is not contiguous \(shape \(6, 4\)"):
        ptfile.scan(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cut short"):
        ptfile.scan(path)
    with pytest.raises(UserError, match=r"args.when is a builtins.object"):
        ptfile.skeleton(path, {"args": {"when": object()}})


def test_every_dtype_name_is_torchs():
    assert all(dtype_name(torch_dtype(name)) == name for name in TORCH_NAMES)
    assert all(torch.empty(0, dtype=torch_dtype(name)).element_size() == size for name, size in ITEMSIZE.items())
