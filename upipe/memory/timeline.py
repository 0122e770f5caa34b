"""What a trace found: the storages there before, then op by op what was allocated and freed, and by whom.

Everything else (peaks, owners at the peak, counts, the stream) is derived from those two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

WORKSPACE = "kernel.workspace"


@dataclass(frozen=True)
class Block:
    """Bytes of one storage: the whole of it, or by how much it grew or shrank.

    Args:
        num_bytes: its size.
        owner: "parameter", "gradient", "input", the label in force when it was allocated, or "other".
        on_host: counted in host bytes instead of device bytes.
    """

    num_bytes: int
    owner: str
    on_host: bool = False


@dataclass(frozen=True)
class Event:
    """One op; the first event is "start", the last "end".

    Args:
        op: its name, ``aten.mm.default``.
        label: the label in force, "" for none.
        new: allocated by it, or grown since the event before (a resize is no op).
        freed: gone, or shrunk, before the next event; `live_bytes` still counts them.
        workspace_bytes: what the op declares to allocate inside.
        live_bytes: device bytes while the op's outputs and its workspace are alive.
        host_bytes: host bytes at the same moment.
    """

    op: str
    label: str
    new: tuple[Block, ...]
    freed: tuple[Block, ...]
    workspace_bytes: int
    live_bytes: int
    host_bytes: int

    @property
    def new_bytes(self) -> tuple[int, ...]:
        """Bytes of each new storage, device and host."""
        return tuple(block.num_bytes for block in self.new)

    @property
    def freed_bytes(self) -> tuple[int, ...]:
        """Bytes of each freed storage, device and host."""
        return tuple(block.num_bytes for block in self.freed)


@dataclass(frozen=True, repr=False)
class Timeline:
    """Live bytes over the ops of a traced function.

    Args:
        baseline: storages that existed before the function ran.
        events: in order, from "start" to "end".
    """

    baseline: tuple[Block, ...]
    events: tuple[Event, ...]

    def __repr__(self) -> str:
        ops = sum(self.op_counts.values())
        return f"Timeline({self.peak_bytes:,} bytes at the peak, {self.host_peak_bytes:,} on the host, {ops} ops)"

    @property
    def peak_bytes(self) -> int:
        """Most device bytes alive at once."""
        return max(event.live_bytes for event in self.events)

    @property
    def host_peak_bytes(self) -> int:
        """Most host bytes alive at once."""
        return max(event.host_bytes for event in self.events)

    @property
    def peak_event(self) -> Event:
        """The first event at which `peak_bytes` are alive."""
        return max(self.events, key=lambda event: event.live_bytes)

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Device bytes of each owner at the peak, largest first; they sum to `peak_bytes`."""
        return self.at_peak_without()

    def peak_without(self, *owners: str) -> int:
        """Return the most device bytes alive at once that belong to none of `owners`.

        The moment is that of these bytes, not of `peak_bytes`: a step beyond its weights and their gradients peaks
        elsewhere than the whole step.
        """
        return sum(self.at_peak_without(*owners).values())

    def at_peak_without(self, *owners: str) -> dict[str, int]:
        """Return the bytes of each other owner at the moment of :meth:`peak_without`, largest first."""
        live: Counter[str] = Counter()
        peak, at_peak = -1, dict[str, int]()
        _add(live, self.baseline)
        for event in self.events:
            _add(live, event.new)
            live[WORKSPACE] += event.workspace_bytes
            total = sum(num_bytes for owner, num_bytes in live.items() if owner not in owners)
            if total > peak:
                peak = total
                at_peak = {owner: n for owner, n in live.most_common() if n and owner not in owners}
            live[WORKSPACE] -= event.workspace_bytes
            _add(live, event.freed, sign=-1)
        return at_peak

    @cached_property
    def op_counts(self) -> dict[str, int]:
        """How often each op ran, most often first; detach and what only asks for a device are left out."""
        return dict(Counter(event.op for event in self.events if event.op not in ("start", "end")).most_common())

    def stream(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
        """Return (op, bytes of new storages, bytes of freed ones) of every event.

        It is the same for real CPU tensors and for fake ones (tests/upipe/memory/test_stream.py).
        """
        return tuple((event.op, event.new_bytes, event.freed_bytes) for event in self.events)


def _add(live: Counter[str], blocks: tuple[Block, ...], sign: int = 1) -> None:
    for block in blocks:
        if not block.on_host:
            live[block.owner] += sign * block.num_bytes
