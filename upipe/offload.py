"""Host memory for what backward needs later: block inputs and, if wanted, attention outputs.

Longer than most files: it holds the book-keeping (:class:`HostMemory`), which no device is needed to test, and the two
ways to copy below it, which are of no use alone.

A tensor that was put goes through these states::

    HELD       on the device: one of the last `keep_last` that were put
    LEAVING    its copy to the host was started; the device tensor lives until the copy was waited for
    AWAY       on the host alone
    ARRIVING   its copy to the device was started; not to be read before the copy was waited for
    HERE       back on the device, its host memory given back
    GONE       taken by get, dropped, or given up
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from upipe.memory.label import label

_log = logging.getLogger("upipe")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@torch.library.custom_op("upipe::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """Copy to host memory, blocking: a clone where `x` is there already. A trace counts the result as host bytes.

    The strides of a dense tensor are kept (a transposed one); any other (every second column, expanded) comes out
    contiguous. That is the rule of ``torch.empty_like``.
    """
    return torch.empty_like(x, device="cpu").copy_(x)


@torch.library.custom_op("upipe::to_device", mutates_args=())
def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`, blocking: a clone where `x` is there already. Strides as in :func:`to_host`."""
    return torch.empty_like(x, device=device).copy_(x)


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@to_device.register_fake
def _(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x)


class Mover(Protocol):
    """How bytes are moved. Copies finish in the order in which they were started.

    :class:`HostMemory` decides when; it keeps the device side of a copy alive until :meth:`wait` or :meth:`abandon`.
    What a mover calls host memory, and the ticket of a copy, are its own business.
    """

    def start_to_host(self, tensor: Tensor) -> tuple[Any, Any]:
        """Start a copy that sees all work the caller has issued; return (host memory, ticket).

        Raises:
            MemoryError: the host has no memory left.
        """

    def start_to_device(self, host: Any) -> tuple[Tensor, Any]:
        """Start a copy; return (the tensor it fills, ticket)."""

    def wait(self, ticket: Any) -> None:
        """Let everything the caller issues from now on come after the copy."""

    def abandon(self, tensor: Tensor) -> None:
        """Nobody will wait: keep the memory of this device side from being used again before its copy is over."""

    def free(self, host: Any) -> None:
        """Take host memory back, which copies started earlier may still use."""

    def spare_sizes(self) -> Sequence[int]:
        """Bytes of each host buffer that is allocated and not in use."""

    def trim(self) -> None:
        """Return the buffers not in use to the system."""


class _State(enum.Enum):
    HELD = "held on the device"
    LEAVING = "leaving for the host"
    AWAY = "on the host"
    ARRIVING = "arriving on the device"
    HERE = "back on the device"
    GONE = "gone"


@dataclass(eq=False)
class _Slot:
    number: int
    tensor: Tensor | None
    mover: Mover
    num_bytes: int
    fake: bool
    version: int | None
    state: _State = _State.HELD
    host: Any = None
    ticket: Any = None
    end: str = ""  # how it went, for the error of a second get


@dataclass(frozen=True, eq=False, repr=False)
class Kept:
    """A tensor in the care of a :class:`HostMemory`; deleting the last reference gives its memory back.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        num_bytes: its elements' bytes.
    """

    shape: torch.Size
    dtype: torch.dtype
    num_bytes: int
    _slot: _Slot

    def __repr__(self) -> str:
        return f"Kept({list(self.shape)}, {self.dtype}, {self._slot.state.value})"


@dataclass(frozen=True)
class HostPlan:
    """What :meth:`HostMemory.plan` found, in bytes of one process.

    Args:
        host_bytes: host memory at the end of the forward.
        free_bytes: what is free for it now.
        forward_device_bytes: device memory held during the forward: `keep_last` tensors and `in_flight` copies.
        backward_device_bytes: during backward: the tensor in use and those fetched ahead.
    """

    host_bytes: int
    free_bytes: int
    forward_device_bytes: int
    backward_device_bytes: int

    def __str__(self) -> str:
        return (
            f"host {_size(self.host_bytes)} of {_size(self.free_bytes)} free; device {_size(self.forward_device_bytes)}"
            f" in forward, {_size(self.backward_device_bytes)} in backward"
        )


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Keep tensors in host memory from forward to backward.

    One object for one model: options that do not change, and the tensors put so far. Two of them share nothing. Put in
    the order of the forward and get in the reverse order; any other order is right too, and slower.

    The result of get equals the tensor put, without its autograd history. The strides of a dense tensor are kept, any
    other comes back contiguous. A tensor that never left the device comes back itself, not as a copy: write to it only
    if you may write to what you put. Between put and the end of its copy a tensor must not be written to; this is
    checked, except for writes through ``.data``.

    On CUDA, copies run on one side stream of this object, with each device. Call put and get on the stream that
    allocates the tensors, as autograd does. Host buffers are of exactly the tensor's size, rounded up to pages (torch's
    own pinned memory is rounded up to powers of two, pytorch #171662), and stay for the next tensor of that size. The
    first step is slower: registering a buffer touches each of its pages. On any other device, and for fake tensors, a
    copy is one blocking op, and nothing is pooled; which tensors live at which op is the same.

    Args:
        pin: page-lock host memory on CUDA. Where the system refuses, one warning is logged and copies go through
            pageable memory, which stalls the caller.
        keep_last: the last tensors put stay on the device, so that backward starts without a copy. A tensor is
            held until that many more were put. It counts tensors: 3 where a block puts 3.
        in_flight: copies that are started and not waited for; one more waits for the oldest.
        prefetch: tensors fetched ahead by get: those put before it that are still here. 0 saves their device memory
            and stalls for each copy.
        limit_bytes: host bytes allowed. None: what the system has available when memory is needed, see
            :func:`available_bytes`, divided by `processes`, nothing left over; not applied to fake tensors.
        processes: processes on this machine that share its memory alike.
        mover: copies in place of the ones above.

    Raises:
        ValueError: an option is out of bounds.

    Cost: device bytes beyond what the caller holds: in forward ``keep_last + in_flight`` tensors after a put, from
    the first get on the one returned and `prefetch` more (tests/upipe/test_offload.py, TestTrace).

    >>> memory = HostMemory(keep_last=1)
    >>> kept = [memory.put(torch.full((2, 3), float(i))) for i in range(3)]
    >>> memory.host_bytes
    48
    >>> [float(memory.get(k).mean()) for k in reversed(kept)]
    [2.0, 1.0, 0.0]
    """

    pin: bool = True
    keep_last: int = 1
    in_flight: int = 2
    prefetch: int = 1
    limit_bytes: int | None = None
    processes: int = 1
    mover: Mover | None = None
    _slots: dict[int, _Slot] = field(init=False, repr=False, default_factory=dict)
    _flying: dict[int, _Slot] = field(init=False, repr=False, default_factory=dict)  # in the order of their start
    _movers: dict[tuple[torch.device, bool], Mover] = field(init=False, repr=False, default_factory=dict)
    _numbers: Iterator[int] = field(init=False, repr=False, default_factory=itertools.count)
    _abandoned: deque[_Slot] = field(init=False, repr=False, default_factory=deque)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 0), ("in_flight", 1), ("prefetch", 0), ("processes", 1), ("limit_bytes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, as of a whole model, has the same options and nothing put.
        return HostMemory, tuple(getattr(self, option.name) for option in fields(self) if option.init)

    @property
    def host_bytes(self) -> int:
        """Bytes of the tensors that are in host memory, or on the way; unused buffers are not counted."""
        return sum(slot.num_bytes for slot in list(self._slots.values()) if slot.host is not None)

    def plan(self, num_blocks: int, block_bytes: int | Sequence[int]) -> HostPlan:
        """Return what a step needs; call it before the first one.

        Args:
            num_blocks: blocks that put their tensors.
            block_bytes: bytes of the tensor a block puts, or of each of its tensors in order.

        Raises:
            ValueError: a count or a size is below 1.
            MemoryError: it does not fit; the message says by how much, and what would.
        """
        sizes = [block_bytes] if isinstance(block_bytes, int) else list(block_bytes)
        if num_blocks < 1 or not sizes or min(sizes) < 1:
            raise ValueError(f"num_blocks={num_blocks} and each of block_bytes={block_bytes} must be at least 1")
        need, free = self._moved_bytes(num_blocks, sizes), self._free_bytes()
        if need > free:
            fitting = (k for k in range(2, num_blocks + 1) if self._moved_bytes(-(-num_blocks // k), sizes) <= free)
            k = next(fitting, None)
            stay = f" (keep_last={self.keep_last} stay on the device)" if self.keep_last else ""
            raise MemoryError(
                f"host memory: {num_blocks} blocks of {_size(sum(sizes))} need {_size(need)}{stay}, {_size(free)} are "
                f"free: {_size(need - free)} short; use {f'checkpoint_every={k}, ' if k else ''}fewer tokens or more "
                "ranks"
            )
        window = self.keep_last + self.in_flight
        return HostPlan(
            need, free, _largest(sizes * num_blocks, window), _largest(sizes * num_blocks, 1 + self.prefetch)
        )

    @torch.no_grad()
    def put(self, tensor: Tensor) -> Kept:
        """Take a tensor, and start moving the one put `keep_last` puts ago.

        Args:
            tensor: any strided tensor; the autograd history is left behind. A view keeps its whole storage on the
                device until it has moved.

        Returns:
            The handle that :meth:`get` takes. Deleting it frees the memory.

        Raises:
            MemoryError: no host memory is left; `tensor` was not taken, the others are as they were.
            RuntimeError: a tensor put earlier was written to before its copy was over; it is given up.
        """
        with self._exclusive():
            fake = isinstance(tensor, FakeTensor)
            version = None if tensor.is_inference() else tensor._version
            num_bytes = tensor.numel() * tensor.element_size()
            slot = _Slot(
                next(self._numbers), tensor.detach(), self._mover_of(tensor.device, fake), num_bytes, fake, version
            )
            self._slots[slot.number] = slot
            try:
                held = [known for known in self._slots.values() if known.state is _State.HELD]
                for known in held[: max(0, len(held) - self.keep_last)]:
                    self._leave(known)
            except BaseException:
                self._release(slot, "not taken")
                raise
            kept = Kept(tensor.shape, tensor.dtype, num_bytes, slot)
            weakref.finalize(kept, self._abandon, slot).atexit = False
            return kept

    @torch.no_grad()
    def get(self, kept: Kept) -> Tensor:
        """Return the tensor on its device, and start fetching those put before it.

        Raises:
            ValueError: `kept` was taken, dropped or given up before, or belongs to another HostMemory.
            RuntimeError: the tensor was written to before its copy was over; it is given up.
        """
        with self._exclusive():
            slot = kept._slot
            if slot.state is _State.GONE:
                raise ValueError(f"{kept!r} was {slot.end}; a tensor is put once and got once, so put it again")
            if self._slots.get(slot.number) is not slot:
                raise ValueError(f"{kept!r} belongs to another HostMemory; get it from the one it was put into")
            for leaving in [known for known in self._flying.values() if known.state is _State.LEAVING]:
                self._retire(leaving)
            if slot.state is _State.HELD:
                self._check_unwritten(slot)
            self._fetch(slot)
            before = [known for known in self._slots.values() if known.number < slot.number]
            for known in reversed(before[max(0, len(before) - self.prefetch) :]):
                self._fetch(known)
            if slot.state is _State.ARRIVING:
                self._retire(slot)
            tensor = slot.tensor
            assert tensor is not None
            self._release(slot, "taken by get")
            return tensor

    def drop(self, kept: Kept) -> None:
        """Give a tensor up and free its memory; nothing happens where that was done before.

        Raises:
            ValueError: `kept` belongs to another HostMemory.
        """
        with self._exclusive():
            if kept._slot.state is not _State.GONE and self._slots.get(kept._slot.number) is not kept._slot:
                raise ValueError(f"{kept!r} belongs to another HostMemory; drop it from the one it was put into")
            self._release(kept._slot, "dropped")

    def reset(self) -> None:
        """Give every tensor up, as after an exception in the middle of a step; host buffers stay for the next."""
        with self._exclusive():
            for slot in list(self._slots.values()):
                self._release(slot, "given up by reset")

    def _mover_of(self, device: torch.device, fake: bool) -> Mover:
        if self.mover is not None:
            return self.mover
        if (device, fake) not in self._movers:
            cuda = device.type == "cuda" and not fake
            self._movers[device, fake] = _CudaMover(device, pin=self.pin) if cuda else _OpMover(device)
        return self._movers[device, fake]

    def _leave(self, slot: _Slot) -> None:
        assert slot.tensor is not None
        self._check_unwritten(slot)
        self._bound()
        self._make_room(slot)
        try:
            with label("offload"):
                slot.host, slot.ticket = slot.mover.start_to_host(slot.tensor)
        except MemoryError as error:
            raise MemoryError(self._shortage(slot, 0)) from error
        self._take_off(slot, _State.LEAVING)

    def _fetch(self, slot: _Slot) -> None:
        if slot.state is not _State.AWAY:
            return
        self._bound()
        with label("offload"):
            slot.tensor, slot.ticket = slot.mover.start_to_device(slot.host)
        self._take_off(slot, _State.ARRIVING)

    def _take_off(self, slot: _Slot, state: _State) -> None:
        slot.state = state
        self._flying[slot.number] = slot

    def _bound(self) -> None:
        while len(self._flying) >= self.in_flight:
            self._retire(next(iter(self._flying.values())))

    def _retire(self, slot: _Slot) -> None:
        """Wait for a copy; only then the source of one to the host, or the host memory of one from it, is let go."""
        slot.mover.wait(slot.ticket)
        del self._flying[slot.number]
        slot.ticket = None
        if slot.state is _State.ARRIVING:
            slot.state = _State.HERE
            slot.mover.free(slot.host)
            slot.host = None
        else:
            slot.state = _State.AWAY
            self._check_unwritten(slot)
            slot.tensor = None

    def _check_unwritten(self, slot: _Slot) -> None:
        assert slot.tensor is not None
        if slot.version is not None and slot.tensor._version != slot.version:
            shape = list(slot.tensor.shape)
            self._release(slot, "written to after put and given up")
            raise RuntimeError(
                f"a tensor {shape} was written to in place after HostMemory.put and before its copy to the host was "
                "over; write to a new tensor, or put a clone"
            )

    def _release(self, slot: _Slot, end: str) -> None:
        if slot.state is _State.GONE:
            return
        del self._slots[slot.number]
        if self._flying.pop(slot.number, None) is not None:
            assert slot.tensor is not None
            slot.mover.abandon(slot.tensor)
        if slot.host is not None:
            slot.mover.free(slot.host)
        slot.state, slot.end = _State.GONE, end
        slot.tensor = slot.host = slot.ticket = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            self._release_abandoned()
            try:
                yield
            finally:
                self._release_abandoned()

    def _abandon(self, slot: _Slot) -> None:
        """Called when a handle dies: in any thread, and by the garbage collector within any line above."""
        self._abandoned.append(slot)
        if self._lock.acquire(blocking=False):
            try:
                self._release_abandoned()
            finally:
                self._lock.release()

    def _release_abandoned(self) -> None:
        while self._abandoned:
            self._release(self._abandoned.popleft(), "deleted")

    def _moved_bytes(self, num_blocks: int, sizes: Sequence[int]) -> int:
        tensors = list(sizes) * num_blocks
        return sum(tensors[: max(0, len(tensors) - self.keep_last)])

    def _spare_bytes(self) -> int:
        return sum(sum(mover.spare_sizes()) for mover in self._all_movers())

    def _all_movers(self) -> list[Mover]:
        return [self.mover] if self.mover is not None else list(self._movers.values())

    def _free_bytes(self) -> int:
        """Bytes to be had, unused buffers included."""
        if self.limit_bytes is not None:
            return self.limit_bytes - self.host_bytes
        return available_bytes() // self.processes + self._spare_bytes()

    def _make_room(self, slot: _Slot) -> None:
        if slot.num_bytes in slot.mover.spare_sizes() or (slot.fake and self.limit_bytes is None):
            return
        free = self._free_bytes()
        if slot.num_bytes > free - self._spare_bytes():
            for mover in self._all_movers():
                mover.trim()
        if slot.num_bytes > free:
            raise MemoryError(self._shortage(slot, free))

    def _shortage(self, slot: _Slot, free: int) -> str:
        return (
            f"host memory: one more tensor of {_size(slot.num_bytes)} after {_size(self.host_bytes)}, {_size(free)} "
            f"are free: {_size(slot.num_bytes - free)} short; use checkpoint_every, fewer tokens or more ranks"
        )


class _OpMover:
    """Blocking copies by two ops: any device, fake tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start_to_host(self, tensor: Tensor) -> tuple[Tensor, None]:
        try:
            return to_host(tensor), None
        except RuntimeError as error:
            if "CPUAllocator" in str(error):
                raise MemoryError(str(error)) from error
            raise

    def start_to_device(self, host: Tensor) -> tuple[Tensor, None]:
        return to_device(host, self._device), None

    def wait(self, ticket: None) -> None: ...

    def abandon(self, tensor: Tensor) -> None: ...

    def free(self, host: Tensor) -> None: ...

    def spare_sizes(self) -> Sequence[int]:
        return ()

    def trim(self) -> None: ...


@dataclass(frozen=True, eq=False)
class _Buffer:
    memory: Tensor  # bytes, whole pages
    view: Tensor  # the tensor in it


class _CudaMover:
    """Copies on one side stream, so in order, between the device and pooled host buffers.

    Device memory belongs to the caller's stream, not to the side stream: it is allocated there, the side stream waits
    for that stream before each copy, and that stream waits for the copy before the memory is read or let go. So the
    allocator may hand it out again at once, in stream order, and no record_stream delays it.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = _Pool(_CudaPin(device) if pin else None, settle=self._stream.synchronize)

    def start_to_host(self, tensor: Tensor) -> tuple[_Buffer, torch.cuda.Event]:
        num_bytes = tensor.numel() * tensor.element_size()
        memory = self._pool.take(num_bytes)
        strides = torch.empty_like(tensor, device="meta").stride()
        view = memory[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, strides)
        return _Buffer(memory, view), self._copy(view, tensor)

    def start_to_device(self, host: _Buffer) -> tuple[Tensor, torch.cuda.Event]:
        view = host.view
        tensor = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self._device)
        return tensor, self._copy(tensor, view)

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def abandon(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def free(self, host: _Buffer) -> None:
        # The next copy into or out of the buffer is behind the present ones on the same stream.
        self._pool.give(host.view.numel() * host.view.element_size(), host.memory)

    def spare_sizes(self) -> Sequence[int]:
        return self._pool.spare_sizes()

    def trim(self) -> None:
        self._pool.trim()

    def _copy(self, destination: Tensor, source: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _Pin(Protocol):
    def register(self, address: int, num_bytes: int) -> int:
        """Page-lock memory; return 0, or the error's number."""

    def unregister(self, address: int) -> None: ...


class _CudaPin:
    def __init__(self, device: torch.device) -> None:
        self._device, self._cudart = device, torch.cuda.cudart()

    def register(self, address: int, num_bytes: int) -> int:
        portable = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process
        error = int(self._cudart.cudaHostRegister(address, num_bytes, portable))
        if error:
            # CUDA remembers the error, and the next kernel launch of this thread would raise it as its own; torch has
            # no cudaGetLastError, so a launch is made to take it.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return error

    def unregister(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)


class _Pool:
    """Host buffers by size. Each is whole pages, so that no page is registered twice.

    Args:
        pin: page-locks buffers; None leaves them pageable.
        settle: waits until no copy uses a buffer; called before any is returned to the system.
    """

    def __init__(self, pin: _Pin | None, *, settle: Callable[[], None]) -> None:
        self._pin, self._settle, self._refused = pin, settle, False
        self._spare: dict[int, list[Tensor]] = {}
        self._all: dict[int, tuple[Tensor, bool]] = {}  # address -> buffer, pinned
        # The buffers are its arguments, so they outlive their registration.
        weakref.finalize(self, _return_to_system, self._all, pin, settle).atexit = False

    def take(self, num_bytes: int) -> Tensor:
        if spare := self._spare.get(num_bytes):
            return spare.pop()
        rounded = max(1, -(-num_bytes // _PAGE)) * _PAGE
        try:
            memory = torch.empty(rounded + _PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        memory = memory[-memory.data_ptr() % _PAGE :][:rounded]
        pinned = self._pin is not None and not self._refused and self._register(self._pin, memory)
        self._all[memory.data_ptr()] = memory, pinned
        return memory

    def give(self, num_bytes: int, memory: Tensor) -> None:
        self._spare.setdefault(num_bytes, []).append(memory)

    def spare_sizes(self) -> Sequence[int]:
        return [num_bytes for num_bytes, buffers in self._spare.items() for _ in buffers]

    def trim(self) -> None:
        spare = [memory.data_ptr() for buffers in self._spare.values() for memory in buffers]
        self._spare.clear()
        _return_to_system({address: self._all.pop(address) for address in spare}, self._pin, self._settle)

    def _register(self, pin: _Pin, memory: Tensor) -> bool:
        error = pin.register(memory.data_ptr(), memory.numel())
        if error:
            self._refused = True
            _log.warning(
                "host memory: pinning %s failed (CUDA error %d), so copies from here on go through pageable memory and "
                "stall the step; raise the limit on locked memory (ulimit -l), or pass pin=False",
                _size(memory.numel()),
                error,
            )
        return not error


def _return_to_system(buffers: dict[int, tuple[Tensor, bool]], pin: _Pin | None, settle: Callable[[], None]) -> None:
    if not buffers:
        return
    settle()
    for address, (_, pinned) in buffers.items():
        if pinned:
            assert pin is not None
            pin.unregister(address)
    buffers.clear()


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes this process may still allocate without swapping, at this moment.

    The kernel's MemAvailable, or less where a control group (version 2: containers, batch jobs) allows less; its file
    cache counts as free. Without ``/proc``, all physical memory.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    try:
        rows = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE
    free = [int(rows["MemAvailable"].split()[0]) * 1024]
    top = root / "sys/fs/cgroup"
    group = top
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
        group = top / next((line[3:].lstrip("/") for line in entries if line.startswith("0::")), "")
    except OSError:
        pass
    for folder in (group, *group.parents):
        if top not in (folder, *folder.parents):
            break
        try:
            limit = (folder / "memory.max").read_text().strip()
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
        except OSError:
            continue
        if limit != "max":
            free.append(max(0, int(limit) - used))
    return min(free)


def _largest(sizes: Sequence[int], window: int) -> int:
    """Return the most bytes of `window` tensors in a row."""
    return max(sum(sizes[start : start + window]) for start in range(len(sizes)))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if abs(num_bytes) >= 2**30 / 10 else f"{num_bytes:,} bytes"
