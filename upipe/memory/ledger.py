"""The ledger of a trace: every storage met, the bytes that came and went at every step.

A storage is found through tensors and is gone when its last tensor is, in Python or in C++: a view or a tensor saved
for backward keeps it alive. Weak references see that; they fire at once, wherever the last owner was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from upipe.memory.timeline import Block, Event, Timeline


class Storage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, and what is known of it."""

    __slots__ = ("device_type", "explicit", "key", "num_bytes", "number", "on_host", "owner")
    key: int
    number: int
    num_bytes: int
    device_type: str
    owner: str
    explicit: bool
    on_host: bool


@dataclass
class Step:
    """An event in the making; owners may still change, so it holds storages and not yet blocks."""

    op: object
    label: str = ""
    new: list[tuple[Storage, int]] = field(default_factory=list)
    freed: list[tuple[Storage, int]] = field(default_factory=list)
    workspace_bytes: int = 0


class Ledger:
    """Live storages by identity, and the steps so far."""

    def __init__(self) -> None:
        self.steps = [Step("start")]
        self._baseline: list[tuple[Storage, int]] = []
        # By id of the storage's Python object, which lives as long as the storage does.
        self._live: dict[int, Storage] = {}
        self._dead: list[Storage] = []
        self._num_storages = 0
        self._accelerated = False

    def find(self, tensor: Tensor) -> Storage | None:
        """Return the entry of a plain tensor's storage, if it was met before."""
        storage = _storage_of(tensor)
        known = self._live.get(id(storage))
        return known if known is not None and known() is storage else None

    def adopt(self, tensor: Tensor, owner: str) -> Storage | None:
        """Return the entry of a storage that existed before the trace; None for one without memory (meta)."""
        known = self.find(tensor)
        if known is None:
            known = self._register(tensor, owner, on_host=False)
            if known is not None:
                self._baseline.append((known, known.num_bytes))
        return known

    def allocate(self, tensor: Tensor, owner: str, step: Step, *, on_host: bool = False) -> Storage | None:
        """Return the entry of a storage; one not met before is new at `step`."""
        known = self.find(tensor)
        if known is None:
            known = self._register(tensor, owner, on_host=on_host)
            if known is not None:
                step.new.append((known, known.num_bytes))
        return known

    def notice_frees(self) -> None:
        """Give what was freed since the last call to the last step, in order of birth."""
        if not self._dead:
            return
        dead, self._dead[:] = sorted(self._dead, key=lambda storage: storage.number), []
        for storage in dead:
            self._live.pop(storage.key, None)
            self.steps[-1].freed.append((storage, storage.num_bytes))

    def notice_resizes(self, before: Step, step: Step) -> None:
        """Read the size of every live storage again (a resize is no op): shrunk after `before`, grown at `step`."""
        resized = [k for k in self._live.values() if (s := k()) is not None and s.nbytes() != k.num_bytes]
        for known in resized:
            storage = known()
            assert storage is not None
            grown = storage.nbytes() - known.num_bytes
            known.num_bytes += grown
            if grown > 0:
                step.new.append((known, grown))
            else:
                before.freed.append((known, -grown))

    def close(self) -> Timeline:
        """Return the timeline, every storage under its final owner, and forget all storages."""
        self.notice_frees()
        end = Step("end")
        self.notice_resizes(self.steps[-1], end)
        self.steps.append(end)
        live, host = 0, 0
        baseline = self._blocks(self._baseline)
        for block in baseline:
            live, host = (live, host + block.num_bytes) if block.on_host else (live + block.num_bytes, host)
        events = []
        for step in self.steps:
            new, freed = self._blocks(step.new), self._blocks(step.freed)
            live += sum(block.num_bytes for block in new if not block.on_host)
            host += sum(block.num_bytes for block in new if block.on_host)
            events.append(
                Event(str(step.op), step.label, new, freed, step.workspace_bytes, live + step.workspace_bytes, host)
            )
            live -= sum(block.num_bytes for block in freed if not block.on_host)
            host -= sum(block.num_bytes for block in freed if block.on_host)
        self._live.clear()
        return Timeline(baseline, tuple(events))

    def _register(self, tensor: Tensor, owner: str, *, on_host: bool) -> Storage | None:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":
            return None
        storage = _storage_of(tensor)
        known = Storage(storage, self._dead.append)
        known.key, known.number = id(storage), self._num_storages
        known.num_bytes, known.device_type = storage.nbytes(), device.type
        known.owner, known.explicit, known.on_host = owner, False, on_host
        self._num_storages += 1
        self._accelerated |= device.type != "cpu"
        self._live[known.key] = known
        return known

    def _blocks(self, parts: list[tuple[Storage, int]]) -> tuple[Block, ...]:
        """Empty storages, which may have grown later, are left out."""
        return tuple(
            Block(n, known.owner, known.on_host or (self._accelerated and known.device_type == "cpu"))
            for known, n in parts
            if n
        )


def is_resized(known: Storage) -> bool:
    """Whether a storage is alive and of another size than last seen."""
    return (storage := known()) is not None and storage.nbytes() != known.num_bytes


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with storages of their own inside a wrapper (a DTensor's local one), or the tensor itself."""
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # a DTensor's mesh is among them
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from plain_tensors(inner)
    else:
        yield tensor


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except NotImplementedError as error:
        raise ValueError(f"a trace follows strided tensors, not layout {tensor.layout}; use a dense one") from error
