"""The pinned store on a device that runs its side stream as late as it may: a copy happens when somebody waits for it, not before.

No accelerator is needed: what can be wrong here is an order, and an order that is not enforced shows at once.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_models.fsdp2.features import offload, recompute, stores
from tests.fsdp2.features.models import batch, gradients, names, stack
from tests.fsdp2.features.test_recompute import equal


class Event:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        while not self.query():
            self.stream.queue.pop(0)()
            self.stream.done += 1


class Stream(TorchDispatchMode):
    """As a mode it takes copies into its queue; the main stream runs everything at once."""

    def __init__(self, device=None):
        super().__init__()
        self.queue, self.done, self.copies = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.queue.append(lambda: args[0].copy_(args[1]))
            self.copies += 1
            return args[0]
        return func(*args, **kwargs or {})

    def wait_stream(self, other) -> None:
        """The main stream is never behind."""

    def wait_event(self, event) -> None:
        event.synchronize()

    def record_event(self) -> Event:
        return Event(self, self.done + len(self.queue))

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Device:
    """What `torch.cuda` is to CUDA."""

    Stream = Stream

    def __init__(self):
        self.main = Stream()

    def current_stream(self, device):
        return self.main

    @contextmanager
    def stream(self, stream):
        with stream:
            yield


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of all pinned buffers that were made."""
    made, device = [], Device()
    monkeypatch.setattr(
        stores, "_pinned", lambda size: made.append(size) or torch.full((size,), 255, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return made


@pytest.mark.parametrize("in_flight", [0, 1 << 14, 1 << 30])
@pytest.mark.parametrize("recomputed", [False, True], ids=["offload", "offload and recompute"])
def test_numbers_are_the_same_and_buffers_are_reused(pinned, in_flight, recomputed):
    model, plain = stack(layers=4), stack(layers=4)
    store = stores.PinnedStore(torch.device("cpu"), in_flight=in_flight)
    if recomputed:
        recompute.apply(model, names(model))
    offload.apply(model, names(model), store, floor=512)
    for one in (model, plain):
        one(*batch(1)).backward()
    buffers = len(pinned)
    assert buffers > 0
    for one in (model, plain):
        for _ in range(3):
            one(*batch(1)).backward()
    equal(gradients(model), gradients(plain))
    assert len(pinned) == buffers and sum(map(len, store._room._free.values())) == buffers
    store.close()
    assert store._stream.queue == [] and store._stream.copies >= 8 * buffers


def test_no_more_than_in_flight_waits(pinned):
    store = stores.PinnedStore(torch.device("cpu"), in_flight=10_000)
    for number in range(5):
        store.put(torch.full((4096,), number, dtype=torch.uint8))
        assert store._waiting_bytes <= 10_000 and len(store._waiting) <= 2


def test_bytes_come_back_when_they_are_asked_for_and_not_before(pinned):
    store = stores.PinnedStore(torch.device("cpu"))
    sent = [torch.full((5000,), number, dtype=torch.uint8) for number in range(3)]
    handles = [store.put(tensor) for tensor in sent]
    store.prefetch(handles[1])
    assert handles[1].back[0].tolist() != [1] * 5000, "the device has run ahead: this test shows nothing"
    assert [store.get(handle).tolist() for handle in handles] == [[number] * 5000 for number in range(3)]


def test_a_change_in_place_before_the_copy_is_an_error(pinned):
    store = stores.PinnedStore(torch.device("cpu"), in_flight=0)
    store._in_flight = 1 << 20
    tensor = torch.zeros(5000, dtype=torch.uint8)
    store.put(tensor)
    tensor.add_(1)
    store._in_flight = 0
    with pytest.raises(RuntimeError, match="changed in place"):
        store.put(torch.zeros(5000, dtype=torch.uint8))
