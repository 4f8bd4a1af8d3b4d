"""Activation offload: what the named modules save for the backward pass lies in a store until it is needed.

    forward    saved tensors of a call go to the store, a storage once however many views of it are saved; the last named module
               keeps its own, since its backward comes at once
    backward   when a call's first tensor is asked for, those of the call before it are fetched ahead
    release    a handle dies with the last graph node that needs it, and its room in the store is free: after a backward pass, an
               exception, or a graph that never gets one

Never offloaded: parameters, as they lie or as FSDP gathers them, and views of them; tensors below `floor` bytes; tensors on
another device; subclasses such as DTensor. Numbers are the same bit by bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mm_models.fsdp2.features.saved import is_parameter
from mm_models.fsdp2.features.stores import Store

FLOOR = 1 << 20
"""Bytes of a storage below which moving it is not worth a transfer."""


def apply(model: nn.Module, names: Iterable[str], store: Store, *, floor: int = FLOOR) -> None:
    """Wrap the forward of the modules `names` of `model`, in the order of the forward pass, in place.

    After `recompute.apply`: of a recomputed module the inputs are what is saved. Before `fully_shard`.
    """
    names = list(names)
    shelf = _Shelf(store, floor)
    for name in names:
        _wrap(model.get_submodule(name), shelf, keep=name == names[-1])


def _wrap(module: nn.Module, shelf: _Shelf, keep: bool) -> None:
    forward = module.forward

    def offloaded(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with shelf.call(module, keep):
            return forward(*args, **kwargs)

    module.forward = offloaded


@dataclass(frozen=True)
class _View:
    """How one saved tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def on(self, stored: Tensor) -> Tensor:
        whole = torch.empty(0, dtype=self.dtype, device=stored.device)
        return whole.set_(stored.untyped_storage(), self.offset, self.size, self.stride)


class _Stored:
    """One storage at one version, in the store. Once fetched it stays until the last node that needs it is gone."""

    def __init__(self, store: Store, tensor: Tensor):
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.detach().as_strided((elements,), (1,), 0)
        self.store = store
        self.handle = store.put(whole.view(torch.uint8))  # a view, which shows changes in place by its version
        self.fetched: Tensor | None = None

    def prefetch(self) -> None:
        if self.fetched is None:
            self.store.prefetch(self.handle)

    def fetch(self) -> Tensor:
        if self.fetched is None:
            self.fetched = self.store.get(self.handle)
        return self.fetched


class _Call:
    """One forward of one module: what it stored, and the call before it."""

    def __init__(self, before: _Call | None):
        self.stored: weakref.WeakSet[_Stored] = weakref.WeakSet()
        self.before = None if before is None else weakref.ref(before)
        self.reached = False

    def reach(self) -> None:
        """The backward pass has come to this call: fetch the one before it ahead."""
        if self.reached:
            return
        self.reached = True
        if self.before and (before := self.before()):
            for stored in before.stored:
                stored.prefetch()


class _Shelf:
    """The storages of all calls in flight, and the hooks that put them there."""

    def __init__(self, store: Store, floor: int):
        self.store, self.floor = store, floor
        # A weak reference to a storage keeps its address from being given to another one.
        self.known: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], _Stored] = weakref.WeakValueDictionary()
        self.last: weakref.ref[_Call] | None = None

    def call(self, module: nn.Module, keep: bool) -> AbstractContextManager:
        """Hooks for one forward of `module`; with `keep` nothing is moved, but the call before is still fetched ahead."""
        call = _Call(self.last() if self.last else None)
        self.last = weakref.ref(call)

        def pack(tensor: Tensor):
            if keep or not self.takes(tensor) or is_parameter(tensor, module):
                # Not the tensor itself: a saved result holds its node, and a graph that gets no backward pass would never die.
                return call, tensor.detach(), None
            stored = self.shelve(tensor)
            call.stored.add(stored)
            return call, stored, _View.of(tensor)

        def unpack(packed) -> Tensor:
            call, held, view = packed
            call.reach()
            return held if view is None else view.on(held.fetch())

        return saved_tensors_hooks(pack, unpack)

    def takes(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type == self.store.device_type
            and tensor.untyped_storage().nbytes() >= self.floor
            and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        )

    def shelve(self, tensor: Tensor) -> _Stored:
        key = StorageWeakRef(tensor.untyped_storage()), tensor._version
        stored = self.known.get(key)
        if stored is None:
            stored = self.known[key] = _Stored(self.store, tensor)
        return stored
