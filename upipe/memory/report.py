"""A timeline as a table that people read."""

from __future__ import annotations

from upipe.memory.timeline import Timeline

GIB = 2**30


def table(timeline: Timeline, unit_bytes: int | None = None) -> str:
    """Return the owners at the device peak, largest first, in bytes and GiB.

    Args:
        timeline: what :func:`upipe.memory.trace` returned.
        unit_bytes: bytes of one activation unit A, B*S*d*2; None leaves the column out.

    Raises:
        ValueError: `unit_bytes` below 1.
    """
    if unit_bytes is not None and unit_bytes < 1:
        raise ValueError(f"unit_bytes={unit_bytes} must be at least 1 byte; use unit_bytes=None for no such column")
    rows = [*timeline.at_peak.items(), ("device peak", timeline.peak_bytes), ("host peak", timeline.host_peak_bytes)]
    lines = [("owner", "bytes", "GiB", "A"), *(_cells(owner, num_bytes, unit_bytes) for owner, num_bytes in rows)]
    if unit_bytes is None:
        lines = [line[:3] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    rule = "-" * len(text[0])
    event = timeline.peak_event
    where = f"peak at {event.op}" + (f" in {event.label}" if event.label else "")
    return "\n".join([where, text[0], rule, *text[1:-2], rule, *text[-2:]])


def _cells(owner: str, num_bytes: int, unit_bytes: int | None) -> tuple[str, ...]:
    return owner, f"{num_bytes:,}", f"{num_bytes / GIB:.3f}", f"{num_bytes / (unit_bytes or 1):.3f}"
