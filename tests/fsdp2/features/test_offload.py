"""Activation offload: numbers bit by bit, what is never moved, prefetch and release, and memory that really falls."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mm_models.fsdp2.features import offload, recompute
from mm_models.fsdp2.features.stores import SpillFileStore
from tests.fsdp2.features.models import batch, gradients, names, stack
from tests.fsdp2.features.test_recompute import equal
from tests.harness import run

FLOOR = 512


class Watched(SpillFileStore):
    """Says what happens to it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log: list[tuple[str, int]] = []
        self.alive = 0

    def put(self, tensor):
        handle = super().put(tensor)
        handle.number = sum(what == "put" for what, _ in self.log)
        self.log.append(("put", handle.number))
        return handle

    def prefetch(self, handle):
        self.log.append(("prefetch", handle.number))
        super().prefetch(handle)

    def get(self, handle):
        self.log.append(("get", handle.number))
        return super().get(handle)

    def of(self, what: str) -> list[int]:
        return [number for event, number in self.log if event == what]

    @property
    def free(self) -> int:
        return sum(size * len(places) for size, places in self._room._free.items())


def train(model, seeds=(1, 2)) -> dict:
    for loss in [model(*batch(seed)) for seed in seeds]:
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("in_flight", [0, 1 << 28], ids=["each written at once", "all may wait"])
def test_numbers_are_the_same_bit_by_bit(in_flight):
    model, store = stack(), Watched(in_flight=in_flight)
    offload.apply(model, names(model), store, floor=FLOOR)
    equal(train(model), train(stack()))
    assert store.of("put") and sorted(set(store.of("get"))) == store.of("put")
    equal(gradients(model), gradients(model))
    store.close()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
def test_of_recomputed_modules_the_input_is_kept_in_the_store(use_reentrant):
    model, store = stack(), Watched()
    recompute.apply(model, names(model), use_reentrant=use_reentrant)
    offload.apply(model, names(model), store, floor=FLOOR)
    equal(train(model, seeds=(1,)), train(stack(), seeds=(1,)))
    assert len(store.of("put")) == 2  # of three layers the last keeps its own
    store.close()


def test_a_storage_is_moved_once_and_parameters_never():
    model, store, seen = stack(layers=2), Watched(), []
    put, wrapped = store.put, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def noted(tensor):
        seen.append((tensor.data_ptr(), tensor))  # kept alive: an address is not given away again
        return put(tensor)

    store.put = noted
    offload.apply(model, names(model), store, floor=1)
    model(*batch(1)).backward()
    places = [place for place, _ in seen]
    assert len(places) > 10 and len(set(places)) == len(places)
    assert not wrapped & set(places)
    store.close()


def test_two_versions_of_a_storage_are_two():
    """The mask is saved, written to the store, changed, and saved again: each product gets its own."""

    class Masked(torch.nn.Module):
        def forward(self, x):
            mask = torch.ones_like(x)
            first = (x * mask).sum()
            store._writer.submit(int).result()
            mask.mul_(3.0)
            return first + (x * mask).sum()

    x = torch.randn(64, 64, requires_grad=True)
    store, moved = Watched(), torch.nn.ModuleList([Masked(), Masked()])
    offload.apply(moved, ["0", "1"], store, floor=1)
    (found,) = torch.autograd.grad(moved[0](x), x)
    assert torch.equal(found, torch.full_like(x, 4.0))
    store.close()


def test_a_change_in_place_while_the_copy_waits_is_an_error():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            y = x.exp()  # saves its result
            y.mul_(2.0)
            return y.sum()

    moved, store, go = torch.nn.ModuleList([Doubled(), Doubled()]), SpillFileStore(), threading.Event()
    store._writer.submit(go.wait)  # the copy cannot begin
    offload.apply(moved, ["0", "1"], store, floor=1)
    loss = moved[0](torch.randn(64, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match="changed in place while it was being offloaded"):
        loss.backward()
    go.set()
    store.close()


def test_the_call_before_is_fetched_ahead_and_room_is_reused():
    """When the last layer's backward begins, all of the second's is fetched; when the second's begins, all of the first's."""
    model, store, marks = stack(), Watched(), []
    offload.apply(model, names(model), store, floor=FLOOR)
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: marks.append(len(store.of("put"))))
    model(*batch(1)).backward()
    first, second = set(range(marks[0])), set(range(marks[0], marks[1]))
    assert first and second and marks[1] == marks[2]
    before = {number: store.log[: store.log.index(("get", number))] for number in (*first, *second)}
    ahead = {number: {n for what, n in log if what == "prefetch"} for number, log in before.items()}
    assert all(second <= ahead[number] for number in second)
    assert all(first <= ahead[number] for number in first)
    earliest = min(second, key=lambda number: len(before[number]))
    assert not any(what == "get" for what, _ in before[earliest])
    end = store._end
    assert store.free == end > 0
    model(*batch(1)).backward()
    assert store._end == end and store.free == end, "the second step found all its room in place"
    store.close()


def test_an_exception_frees_its_room_and_closing_the_file():
    model, store = stack(), Watched()
    offload.apply(model, names(model), store, floor=FLOOR)
    down, model.layers[2].down = model.layers[2].down, None
    with pytest.raises(TypeError):
        model(*batch(1))
    gc.collect()
    store._writer.submit(int).result()
    assert store.free == store._end > 0
    model.layers[2].down = down
    loss = model(*batch(1))
    hook = model.layers[0].norm.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss
    hook.remove()
    gc.collect()
    assert store.free == store._end
    file = os.readlink(f"/proc/self/fd/{store._file.fileno()}")
    assert file.endswith("(deleted)")
    store.close()
    assert file not in [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_a_full_disk_is_an_error(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    model, store = stack(), SpillFileStore()
    offload.apply(model, names(model), store, floor=FLOOR)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        model(*batch(1)).backward()
    store.close()


def test_without_gradients_nothing_is_moved():
    model, store = stack(), Watched()
    offload.apply(model, names(model), store, floor=1)
    with torch.no_grad():
        model(*batch(1))
    assert store.log == []
    store.close()


def sharded(rank: int, moved: bool, recomputed: bool) -> tuple[dict, bool]:
    """Router in fp32, experts and layers as groups in bf16, gathered anew for the backward pass."""
    model, store = stack().float(), Watched()
    if recomputed:
        recompute.apply(model, names(model))
    gathered: set[int] = set()
    if moved:
        put = store.put

        def noted(tensor):
            for part in model.modules():
                for p in part.parameters(recurse=False):
                    if not hasattr(p, "to_local"):
                        gathered.add(int(p.untyped_storage().data_ptr() == tensor.data_ptr()))
            return put(tensor)

        store.put = noted
        offload.apply(model, names(model), store, floor=1)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer.mlp.gate)
        fully_shard(layer.mlp.experts, mp_policy=bf16)
        fully_shard(layer, mp_policy=bf16)
    fully_shard(model, mp_policy=bf16)
    for step in range(2):
        x, scale = batch(1 + 2 * step + rank)
        model(x.bfloat16(), tuple(one.bfloat16() for one in scale)).float().backward()
    store.close()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, gathered == {0} or not moved


@pytest.mark.parametrize("recomputed", [False, True], ids=["offload", "offload and recompute"])
def test_under_fully_shard(recomputed):
    wanted, _ = run(sharded, 2, False, False)[1]
    found, only_activations = run(sharded, 2, True, recomputed)[1]
    assert only_activations
    equal(found, wanted)


PEAK = """
import json, sys, torch
from mm_models.fsdp2.features import offload, recompute
from mm_models.fsdp2.features.stores import SpillFileStore, return_freed_memory
from mm_models.weights.conversion import peak_rss
from tests.fsdp2.features.models import batch, names, stack
torch.set_num_threads(1)
return_freed_memory(1 << 18)
moved, recomputed, length = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = stack(layers=8)
if recomputed:
    recompute.apply(model, names(model))
if moved:
    offload.apply(model, names(model), SpillFileStore(in_flight=1 << 23), floor=1 << 18)
model(*batch(1, size=1, length=64)).backward()
before = peak_rss()  # getrusage would count the parent that forked this process
model(*batch(1, size=1, length=length)).backward()
print(json.dumps(peak_rss() - before))
"""


def growth(*, moved: bool, recomputed: bool = False, length: int = 16384) -> int:
    """Bytes by which the peak resident memory of a fresh process grows in one long step."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(int(moved)), str(int(recomputed)), str(length)],
        cwd=root, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_peak_memory_of_a_process_really_falls():
    """Eight layers save about 60 MB each here; with offload the activations of one or two are held at a time."""
    plain, moved = growth(moved=False), growth(moved=True)
    assert moved < 0.45 * plain, (plain, moved)
