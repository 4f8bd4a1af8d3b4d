"""Examined samples in one Arrow file, read through Hugging Face `datasets` without loading it.

A file is an Arrow stream of record batches, one per chunk of rows, in the order of the rows. Readers map it into memory:
processes on one machine share its pages, and a sample is copied out only when it is asked for.

    id       int64                     row number through all files
    ids      list of int32             token ids
    trained  list of int32             start, end, start, end ...
    images   list of {path, bytes}     a file, or with bytes its content and its name
    grids    list of int32             three numbers per image
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_models.data.images import ImageBytes
from mm_models.data.sample import Sample
from mm_models.errors import UserError

if TYPE_CHECKING:
    import pyarrow

LAYOUT = 1
"""Raised with every change of the columns: older caches are then built anew."""


def schema() -> pyarrow.Schema:
    import pyarrow as pa

    numbers = pa.list_(pa.int32())
    image = pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])
    return pa.schema(
        [("id", pa.int64()), ("ids", numbers), ("trained", numbers), ("images", pa.list_(image)), ("grids", numbers)]
    )


def encode(samples: Sequence[Sample]) -> pyarrow.RecordBatch:
    """The samples as one record batch."""
    import pyarrow as pa

    columns = [
        pa.array([sample.id for sample in samples], pa.int64()),
        _numbers([sample.ids for sample in samples]),
        _numbers([array("i", [end for span in sample.trained for end in span]) for sample in samples]),
        pa.array([[_image(image) for image in sample.images] for sample in samples], schema().field("images").type),
        _numbers([array("i", [size for grid in sample.grids for size in grid]) for sample in samples]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema())


def _numbers(lists: Sequence[array]) -> pyarrow.ListArray:
    import pyarrow as pa

    flat = b"".join(found.tobytes() for found in lists)
    offsets = array("i", accumulate((len(found) for found in lists), initial=0))
    values = pa.Array.from_buffers(pa.int32(), offsets[-1], [None, pa.py_buffer(flat)])
    ends = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets.tobytes())])
    return pa.ListArray.from_arrays(ends, values)


def _image(image: Path | ImageBytes) -> dict[str, Any]:
    if isinstance(image, ImageBytes):
        return {"path": image.name, "bytes": image.data}
    return {"path": str(image), "bytes": None}


def _read_image(image: dict[str, Any]) -> Path | ImageBytes:
    if image["bytes"] is None:
        return Path(image["path"])
    return ImageBytes(data=image["bytes"], name=image["path"])


def to_bytes(batch: pyarrow.RecordBatch) -> bytes:
    """A record batch as it travels from a worker."""
    return batch.serialize().to_pybytes()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, as an error that names the file and the settings that choose another place."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"examined samples cannot be written to {path} ({error.strerror or error}). Make room there, or name another "
            "folder: basic_parameters.cache_dir, or TMPDIR where that is null."
        ) from error


class Writer:
    """Writes record batches to a new file; a context manager."""

    def __init__(self, path: Path):
        import pyarrow as pa

        self._path = path
        with writing(path):
            self._file = pa.OSFile(str(path), "wb")
            self._stream = pa.ipc.new_stream(self._file, schema())

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        with writing(self._path), self._file:
            if kind is None:  # else the file is of no use, and its end may not fit either
                self._stream.close()

    def write(self, batch: bytes) -> None:
        """Append what `to_bytes` gave."""
        import pyarrow as pa

        with writing(self._path):
            self._stream.write_batch(pa.ipc.read_record_batch(pa.py_buffer(batch), schema()))


class SampleStore:
    """Samples of a file by index. Pickled, it is the path alone."""

    def __init__(self, path: Path):
        self.path, self._rows = path, None

    def __len__(self) -> int:
        return len(self._open())

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_rows": None}

    def __getitem__(self, index: int) -> Sample:
        row = self._open()[int(index)]
        trained, grids = _ints(row, "trained"), _ints(row, "grids")
        return Sample(
            id=row.column("id")[0].as_py(),
            ids=_ints(row, "ids"),
            trained=tuple(_groups(trained, 2)),
            images=tuple(_read_image(image) for image in row.column("images")[0].as_py()),
            grids=tuple(_groups(grids, 3)),
        )

    def ids(self) -> list[int]:
        """The row numbers of all samples, in order."""
        return self._open().data.column("id").to_pylist()

    def _open(self) -> Any:
        if self._rows is None:
            from datasets import Dataset

            self._rows = Dataset.from_file(str(self.path)).with_format("arrow")
        return self._rows


def _ints(row: pyarrow.Table, name: str) -> array:
    found = array("i")
    found.frombytes(row.column(name)[0].values.to_numpy().tobytes())
    return found


def _groups(numbers: array, size: int) -> Iterable[tuple[int, ...]]:
    return zip(*[iter(numbers.tolist())] * size, strict=True)
