"""Examined samples kept between runs, in `cache_dir`.

The key is a hash of everything a sample depends on: the contents of the data files, of the processor's files, every
option but those of the machine, the folder of the images, and the code and libraries that make a sample of a row. Image
files count by size and time of last change, which are looked at each time a cache is opened.

    KEY.json                 what was found, and the names and sizes of the other two; replaced in one step
    KEY-ID.samples.arrow     the samples
    KEY-ID.images.arrow      path, size and time of each image file
    KEY.lock                 held by the process that builds; the others wait and read

A cache that is cut off, of another layout or of changed images is built anew, which is said. Nothing that a running
process may read is removed: the files of the build before last are. Refused: a folder that cannot be written, or whose
file system has no locks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data.report import Counts
from mm_models.data.stamps import Stamp, stamp
from mm_models.data.store import LAYOUT, writing
from mm_models.errors import UserError
from mm_models.registry import table

MACHINE = {"cache_dir", "overwrite_cache", "preprocessing_batch_size", "preprocessing_num_workers", "preprocess_on_fly"}
"""Options of basic_parameters that change no sample."""
NAMED = {"dataset", "val_dataset", "dataset_dir", "dataset_weights", "streaming"}
"""Options that the key holds by content or place instead, or that act after the cache."""
PROCESSOR_FILES = (".json", ".jinja", ".txt", ".model")
LIBRARIES = ("transformers", "tokenizers", "pillow", "numpy", "jinja2")
PATIENCE = 10
"""Seconds to wait for a lock before saying so."""

Build = Callable[[Path], tuple[Counts, dict[Path, Stamp]]]
"""Writes the samples to a path; what was found, and what the image files looked like."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """An open cache."""

    id: str
    samples: Path
    counts: Counts
    built: bool = False
    """By this process, now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stale:
    """Why a cache cannot be used; None where there is none yet."""

    reason: str | None = None
    id: str | None = None


def key(config: DataConfig, paths: Sequence[Path], *, split: str) -> str:
    """The name of the cache of these files."""
    parameters = config.dataset_param
    basic = parameters.basic_parameters
    folder = Path(parameters.preprocess_parameters.model_name_or_path)
    template = table("templates").get(basic.template)
    modules = {kind.__module__ for kind in getattr(template, "__mro__", (template,))} - {"builtins"}
    parts: dict[str, Any] = {
        "layout": LAYOUT,
        "split": split,
        "basic": basic.model_dump(exclude=MACHINE | NAMED),
        "attr": parameters.attr.model_dump(),
        "preprocess": parameters.preprocess_parameters.model_dump(exclude={"model_name_or_path"}),
        "images": os.path.abspath(basic.dataset_dir),
        "data": [digest(path) for path in paths],
        "processor": {
            path.name: digest(path)
            for path in sorted(folder.iterdir())
            if path.suffix in PROCESSOR_FILES and not path.name.endswith(".index.json") and path.is_file()
        },
        "code": code_digest(frozenset(Path(sys.modules[name].__file__) for name in modules)),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def digest(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


@functools.cache
def code_digest(template: frozenset[Path]) -> str:
    """The hash of the code that makes a sample of a row; `template` are the files of the template and of its bases."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), *sorted(here.glob("templates/*.py")), *sorted(template)]
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def open_or_build(folder: Path, key: str, build: Build, *, overwrite: bool) -> Cached:
    """The cache of `key`, built by `build` under a lock where there is none that can be used.

    With `overwrite` it is built anew, once by processes that start together.
    """
    before = load(folder, key)
    if isinstance(before, Cached) and not overwrite:
        return before
    with _writable(folder), _lock(folder / f"{key}.lock"):
        now = load(folder, key)
        if isinstance(now, Cached) and not (overwrite and now.id == before.id):
            return now
        if isinstance(now, Stale) and now.reason:
            print(f"data cache {folder / key}.json: {now.reason}; built anew", flush=True)
        id = secrets.token_hex(4)
        keep = {id, now.id}
        try:
            samples, images = (_part(folder, key, id, name) for name in ("samples", "images"))
            counts, stamps = build(samples)
            with writing(folder):
                _write_stamps(images, stamps)
                sizes = {"samples": samples.stat().st_size, "images": images.stat().st_size}
                meta = {"layout": LAYOUT, "id": id, "counts": dataclasses.asdict(counts), "files": sizes}
                new = folder / f"{key}-{id}.json"
                new.write_text(json.dumps(meta), encoding="utf-8")
                os.replace(new, folder / f"{key}.json")
        except BaseException:
            keep.discard(id)
            raise
        finally:
            for path in folder.glob(f"{key}-*"):
                if path.name.removeprefix(f"{key}-").split(".")[0] not in keep:
                    path.unlink(missing_ok=True)
        return dataclasses.replace(load(folder, key), built=True)


def load(folder: Path, key: str) -> Cached | Stale:
    """The cache of `key` if it is there, whole, and its images are as they were."""
    try:
        meta = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        if meta["layout"] != LAYOUT:
            return Stale(reason="of another layout")
        id, sizes = meta["id"], meta["files"]
        counts = Counts.from_json(meta["counts"])
    except FileNotFoundError:
        return Stale()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Stale(reason=f"cannot be read ({error!r})")
    paths = {name: _part(folder, key, id, name) for name in ("samples", "images")}
    for name, path in paths.items():
        size = path.stat().st_size if path.is_file() else 0
        if size != sizes[name]:
            return Stale(reason=f"{path.name} has {size} bytes, expected {sizes[name]}", id=id)
    for path, then in _read_stamps(paths["images"]):
        if stamp(path) != then:
            return Stale(reason=f"image {str(path)!r} has changed", id=id)
    return Cached(id=id, samples=paths["samples"], counts=counts)


def _part(folder: Path, key: str, id: str, name: str) -> Path:
    return folder / f"{key}-{id}.{name}.arrow"


def _write_stamps(path: Path, stamps: dict[Path, Stamp]) -> None:
    import pyarrow as pa

    columns = {
        "path": pa.array(map(str, stamps), pa.string()),
        "size": pa.array([size for size, _ in stamps.values()], pa.int64()),
        "mtime_ns": pa.array([time for _, time in stamps.values()], pa.int64()),
    }
    found = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, found.schema) as stream:
        stream.write_table(found)


def _read_stamps(path: Path) -> Iterator[tuple[Path, Stamp]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield Path(row[0]), (row[1], row[2])


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"basic_parameters.cache_dir {str(folder)!r}: cannot be made ({error}).") from error
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"basic_parameters.cache_dir {str(folder)!r} cannot be written, and holds no cache of this data. "
            "Name another folder, or null for a temporary one."
        )
    yield


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            print(f"data cache: waiting for the process that holds {path}", flush=True)
            lock.acquire()
    except (NotImplementedError, OSError) as error:
        raise UserError(
            f"basic_parameters.cache_dir: {path} cannot be locked ({error}). Name a folder on a file system with locks."
        ) from error
    try:
        yield
    finally:
        lock.release()
