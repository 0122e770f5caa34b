"""Measured numbers as records: one JSON object a cell, in a file that survives being killed, and tables made of them.

Every number that a program prints comes from a record, with the commit and the versions it was measured with. The
file is longer than others because it holds a record's whole way: made, kept, read, shown.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from rich.markup import escape
from rich.table import Table

JSON: TypeAlias = "str | int | float | bool | list[JSON] | dict[str, JSON] | None"
Value: TypeAlias = "int | float | str"

OOM = "OOM"
METHODS = ("local", "ulysses", "alst", "upipe_paper", "upipe", "frontier", "ring", "native_pytorch", "deepspeed")
# Quantity -> unit. A is one activation unit, B*S*d*2 bytes.
UNITS = {
    "peak_memory_gib": "GiB",
    "host_memory_gib": "GiB",
    "peak_units_forward": "A",
    "peak_units_backward": "A",
    "tokens_per_s_per_gpu": "tokens/s",
    "time_ms": "ms",
    "live_peak_bytes": "bytes",
    "heads_moved": "heads",
    "nll": "nats",
    "grad_error": "relative",
}
SOURCE_TREE = Path(__file__).resolve().parents[1]
# What decides a run's numbers; a note in docs/ does not.
SOURCES = ("upipe", "experiments", "paper_configs", "pyproject.toml")
PACKAGES = ("torch", "upipe", "numpy")
OPTIONAL_PACKAGES = ("deepspeed", "transformers", "accelerate", "flash-attn", "liger-kernel", "triton")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured cell.

    Args:
        experiment: the config's name.
        method: one of METHODS.
        model: the config's name.
        hardware: the config's name.
        length_tokens: T, of the whole sequence.
        quantity: one of UNITS.
        value: a finite number, or "OOM".
        commit: of the source tree, see :func:`commit`.
        versions: package -> version, see :func:`versions`.
        published: the paper's value of this cell; None where it has none.
        unit: of the quantity; None takes it from UNITS, which allows no other.
        extra: further keys of the line: the step, the loss, the dials of the method.

    Raises:
        ValueError: a field outside these.
    """

    experiment: str
    method: str
    model: str
    hardware: str
    length_tokens: int
    quantity: str
    value: Value
    commit: str
    versions: Mapping[str, str]
    published: Value | None = None
    unit: str | None = None
    extra: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("quantity", self.quantity, UNITS)
        if self.unit is None:
            object.__setattr__(self, "unit", UNITS[self.quantity])
        _check_choice("unit", self.unit, (UNITS[self.quantity],))
        if isinstance(self.length_tokens, bool) or not isinstance(self.length_tokens, int) or self.length_tokens < 1:
            raise ValueError(f"length_tokens={self.length_tokens!r} must be an integer of at least 1")
        _check_value("value", self.value)
        if self.published is not None:
            _check_value("published", self.published)
        shadowed = sorted(set(self.extra) & {*_FIXED_KEYS, "extra"})
        if shadowed:
            raise ValueError(f"extra has the keys {', '.join(shadowed)}, which a record has itself; rename them")
        self.to_json()

    def to_json(self) -> str:
        """Return the record as one line without its end."""
        try:
            return json.dumps({**{key: getattr(self, key) for key in _FIXED_KEYS}, **self.extra}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the record of {self.quantity} is not JSON ({error}); use numbers that are finite, strings, lists and "
                "dicts of them"
            ) from error

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not such a line.
        """
        keys = json.loads(line)
        missing = [key for key in _FIXED_KEYS if not isinstance(keys, dict) or key not in keys]
        if missing:
            raise ValueError(f"not a record: {', '.join(missing)} missing")
        return cls(**{key: keys.pop(key) for key in _FIXED_KEYS}, extra=keys)

    def get(self, key: str) -> JSON:
        """Return a field or an extra key.

        Raises:
            ValueError: the record has neither.
        """
        if key in _FIXED_KEYS:
            return getattr(self, key)
        if key not in self.extra:
            raise ValueError(f"a record has no {key}; it has {', '.join([*_FIXED_KEYS, *self.extra])}")
        return self.extra[key]


# In the order of a line.
_FIXED_KEYS = (
    *("experiment", "method", "model", "hardware", "length_tokens", "quantity"),
    *("value", "unit", "published", "commit", "versions"),
)
assert {*_FIXED_KEYS, "extra"} == {f.name for f in fields(Record)}


def _check_choice(name: str, value: object, valid: Iterable[str]) -> None:
    if value not in valid:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(valid)}")


def _check_value(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value != OOM and not (number and math.isfinite(value)):
        raise ValueError(f'{name}={value!r} must be a finite number or "{OOM}"')


@dataclass(frozen=True)
class RecordFile:
    """A file of records, one a line. One process writes it; a file that is not there yet holds none.

    A process killed while it appends leaves a last line without an end. Such a line is no record: it is left out when
    reading and cut off before the next append.
    """

    path: Path

    def append(self, record: Record) -> None:
        """Add a record; it is on the disk when this returns."""
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            file.write(record.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """Return the records in the order they were added.

        Raises:
            ValueError: a line before the end is not a record.
        """
        if not self.path.exists():
            return []
        records = []
        *lines, _torn = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                records.append(Record.from_json(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path}:{number}: {error}; remove the line or choose another file") from error
        return records

    def keep_only(self, keep: Callable[[Record], bool]) -> None:
        """Drop the records for which `keep` is false: all at once, or not at all if it is interrupted."""
        if not self.path.exists():
            return
        kept = [record for record in self.read() if keep(record)]
        replacement = self.path.with_name(self.path.name + ".tmp")
        with replacement.open("wb") as file:
            file.writelines(record.to_json().encode() + b"\n" for record in kept)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(self.path)

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, which a run resumed after `step` measures again; those without one stay."""
        self.keep_only(lambda record: record.extra.get("step", step) <= step)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a number, those that are installed."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package in PACKAGES:
                found[package] = "not installed"
    return found


def commit(root: Path = SOURCE_TREE) -> str:
    """Return the git commit of the source tree, with "+dirty" when SOURCES differ; "unknown" without a checkout."""
    try:
        # An installed package may lie below somebody else's checkout.
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        dirty = _git(root, "--no-optional-locks", "status", "--porcelain", "--", *SOURCES)
        return _git(root, "rev-parse", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, text=True, timeout=30)
    return done.stdout.strip()


def open_output(path: str | Path) -> Path:
    """Make the folder of a run's output and try to write into it, before anything is computed.

    Raises:
        ValueError: it cannot be made or written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(f"out={path}: cannot write {folder}: {error.strerror}; choose another folder") from error
    return folder


def pivot(records: Iterable[Record], *, rows: Sequence[str], columns: str) -> tuple[list[str], list[list[str]]]:
    """Arrange records: one row for each combination of the keys `rows`, one column for each value of `columns`.

    Rows and columns come in the order of their first record; a cell shows the paper's value behind ours.

    Returns:
        The header, and the rows of text.

    Raises:
        ValueError: a key that a record does not have, or two records in one cell.
    """
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    names: dict[str, None] = {}
    for record in records:
        row, column = tuple(_text(record.get(key)) for key in rows), _text(record.get(columns))
        names[column] = None
        line = cells.setdefault(row, {})
        if column in line:
            raise ValueError(
                f"two records for {', '.join(f'{k}={v}' for k, v in zip(rows, row, strict=True))}, {columns}={column}; "
                "select fewer records, or add the key in which they differ to rows"
            )
        published = "" if record.published is None else f" (paper {_text(record.published)})"
        line[column] = _text(record.value) + published
    return [*rows, *names], [[*row, *(line.get(name, "") for name in names)] for row, line in cells.items()]


def _text(value: JSON) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(records: Iterable[Record], *, rows: Sequence[str], columns: str, title: str | None = None) -> Table:
    """Return the :func:`pivot` of the records as a table for the terminal."""
    header, lines = pivot(records, rows=rows, columns=columns)
    made = Table(title=title)
    for name in header:
        made.add_column(escape(name), justify="left" if name in rows else "right", overflow="fold")
    for line in lines:
        made.add_row(*map(escape, line))
    return made


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, such as of a :func:`pivot`.

    Raises:
        ValueError: a row with more or fewer cells than the header.
    """
    lines = []
    for row in (header, *rows):
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {list(row)}; give each a cell")
        lines.append([cell.replace("|", r"\|").replace("\n", " ") for cell in row])
    lines.insert(1, ["---"] * len(header))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
