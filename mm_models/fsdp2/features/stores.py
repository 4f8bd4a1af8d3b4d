"""Where offloaded activations lie: pinned host memory beside an accelerator, a spill file on the CPU.

    handle = store.put(tensor)     # starts the copy; `tensor` (bytes, 1-D, uint8) may be let go at once
    store.prefetch(handle)         # starts the way back
    tensor = store.get(handle)     # the bytes on the device again; waits for them
    del handle                     # gives its room back, whatever happened before

Room is reused, never returned while the store lives: steps after the first allocate nothing. Both stores keep a tensor alive until
its copy is done, and hold back the caller while more than `in_flight` bytes wait: without that nothing would leave memory when
the other side is slower. A tensor changed in place before its copy is done is an error, as it is for autograd without a store.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

IN_FLIGHT = 1 << 28
"""Bytes that may wait for their copy."""


class Handle(Protocol):
    """What `put` returns. Its room is free again when the last reference to it is gone."""


class Store(Protocol):
    device_type: str

    def put(self, tensor: Tensor) -> Handle: ...

    def prefetch(self, handle: Handle) -> None: ...

    def get(self, handle: Handle) -> Tensor: ...

    def close(self) -> None: ...


def return_freed_memory(above: int = 1 << 20) -> bool:
    """Have glibc give blocks of more than `above` bytes back to the system when they are freed. False where the libc is another.

    By default it keeps blocks of up to 32 MB in its heap, where the live ones in between hold the freed ones: of 360 MB of
    activations that go to a file 120 stay resident, with this 260 leave. For the whole process: such blocks cost page faults anew.
    """
    M_MMAP_THRESHOLD = -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, above) == 1


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "a tensor saved for the backward pass was changed in place while it was being offloaded "
            f"(version {tensor._version}, saved at {version})"
        )


class _Room:
    """Free places by size. Sizes are rounded up to one of eight between powers of two, so that lengths that vary reuse them."""

    def __init__(self):
        self._free: dict[int, list[Any]] = defaultdict(list)

    @staticmethod
    def size(wanted: int) -> int:
        step = max(4096, 1 << max(0, wanted.bit_length() - 4))
        return -(-wanted // step) * step

    def take(self, size: int) -> Any | None:
        return self._free[size].pop() if self._free[size] else None

    def give(self, size: int, place: Any) -> None:
        self._free[size].append(place)


class _FileHandle:
    def __init__(self, room: _Room, size: int, offset: int, tensor: Tensor):
        self.room, self.size, self.offset, self.bytes = room, size, offset, tensor.numel()
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.written: Future | None = None
        self.read: Future | None = None

    def __del__(self):
        # The writer holds the handle until the bytes are out, so the place is nobody's here.
        self.room.give(self.size, self.offset)


class SpillFileStore:
    """One file without a name in `folder`, so it is gone with the process whatever ends it. Written and read by a thread each.

    Plain reads and writes, not a mapping: mapped pages would count as resident memory of the process. `folder` (`TMPDIR`, else /tmp)
    must be on a disk: in a memory file system nothing is saved. The file grows to the most that is ever offloaded at a time; a
    full disk is an error at `put`.
    """

    device_type = "cpu"

    def __init__(self, folder: str | None = None, *, in_flight: int = IN_FLIGHT):
        self._file = tempfile.TemporaryFile(dir=folder, prefix="activations-", buffering=0)  # noqa: SIM115  closed by close
        return_freed_memory()
        self._end, self._room, self._in_flight = 0, _Room(), in_flight
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-read")
        self._waiting: deque[tuple[Future, int]] = deque()
        self._waiting_bytes = 0

    def put(self, tensor: Tensor) -> _FileHandle:
        size = _Room.size(tensor.numel())
        handle = _FileHandle(self._room, size, self._place(size), tensor)
        handle.written = self._writer.submit(self._write, handle)
        self._waiting.append((handle.written, size))
        self._waiting_bytes += size
        while self._waiting and (self._waiting_bytes > self._in_flight or self._waiting[0][0].done()):
            written, size = self._waiting.popleft()
            self._waiting_bytes -= size
            written.result()
        return handle

    def prefetch(self, handle: _FileHandle) -> None:
        if handle.read is None and handle.tensor is None:
            tensor = torch.empty(
                handle.bytes, dtype=torch.uint8
            )  # here: a thread's own heap would hold it back afterwards
            handle.read = self._reader.submit(self._read, handle.offset, tensor)

    def get(self, handle: _FileHandle) -> Tensor:
        held = handle.tensor  # still on its way out: the writer drops it at any moment, so look once
        if held is not None:
            _check_unchanged(held, handle.version)
            return held
        handle.written.result()
        self.prefetch(handle)
        read, handle.read = handle.read, None
        return read.result()

    def close(self) -> None:
        """End both threads and give the file back. Handles must not be used afterwards."""
        self._writer.shutdown(cancel_futures=True)
        self._reader.shutdown(cancel_futures=True)
        self._waiting.clear()
        self._file.close()

    def _place(self, size: int) -> int:
        offset = self._room.take(size)
        if offset is None:
            offset, self._end = self._end, self._end + size
            os.posix_fallocate(self._file.fileno(), offset, size)
        return offset

    def _write(self, handle: _FileHandle) -> None:
        left, offset = memoryview(handle.tensor.numpy()), handle.offset
        while left:
            done = os.pwrite(self._file.fileno(), left, offset)
            left, offset = left[done:], offset + done
        _check_unchanged(handle.tensor, handle.version)
        handle.tensor = None

    def _read(self, offset: int, tensor: Tensor) -> Tensor:
        left, at = memoryview(tensor.numpy()), offset
        while left:
            done = os.preadv(self._file.fileno(), [left], at)
            if not done:
                raise RuntimeError(f"the spill file of activations ends at {at}, {len(left)} bytes early")
            left, at = left[done:], at + done
        os.posix_fadvise(self._file.fileno(), offset, len(tensor), os.POSIX_FADV_DONTNEED)
        return tensor


class _PinnedHandle:
    def __init__(self, room: _Room, size: int, buffer: Tensor, length: int):
        self.room, self.size, self.buffer, self.bytes = room, size, buffer, length
        self.back: tuple[Tensor, Any] | None = None

    def __del__(self):
        self.room.give(self.size, self.buffer)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedStore:
    """Pinned host buffers, and one side stream of the accelerator for the copies in both directions.

    One stream, so that a buffer given back while a copy from it still runs is safe: the next copy into it comes after.
    """

    def __init__(self, device: torch.device, *, in_flight: int = IN_FLIGHT):
        self.device, self.device_type = device, device.type
        self._on = torch.get_device_module(device)
        self._stream = self._on.Stream(device)
        self._room, self._in_flight = _Room(), in_flight
        self._waiting: deque[tuple[Any, Tensor, int]] = deque()
        self._waiting_bytes = 0

    def put(self, tensor: Tensor) -> _PinnedHandle:
        size = _Room.size(tensor.numel())
        buffer = self._room.take(size)
        if buffer is None:
            buffer = _pinned(size)
        handle = _PinnedHandle(self._room, size, buffer, tensor.numel())
        self._stream.wait_stream(self._on.current_stream(self.device))
        with self._on.stream(self._stream):
            buffer[: tensor.numel()].copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        self._waiting.append((copied, tensor, tensor._version))
        self._waiting_bytes += tensor.numel()
        while self._waiting and (self._waiting_bytes > self._in_flight or self._waiting[0][0].query()):
            copied, tensor, version = self._waiting.popleft()
            self._waiting_bytes -= tensor.numel()
            copied.synchronize()  # once it is let go, the allocator gives its memory to the next kernel
            _check_unchanged(tensor, version)
        return handle

    def prefetch(self, handle: _PinnedHandle) -> None:
        if handle.back is not None:
            return
        tensor = torch.empty(handle.bytes, dtype=torch.uint8, device=self.device)
        self._stream.wait_stream(self._on.current_stream(self.device))  # whose kernels may still use this memory
        with self._on.stream(self._stream):
            tensor.copy_(handle.buffer[: handle.bytes], non_blocking=True)
            handle.back = tensor, self._stream.record_event()
        tensor.record_stream(self._stream)

    def get(self, handle: _PinnedHandle) -> Tensor:
        self.prefetch(handle)
        (tensor, copied), handle.back = handle.back, None
        self._on.current_stream(self.device).wait_event(copied)
        return tensor

    def close(self) -> None:
        self._stream.synchronize()
        self._waiting.clear()
