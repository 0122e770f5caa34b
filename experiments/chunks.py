"""Compare chunk sizes of one attention layer, for real on CPU ranks and traced at full size.

python -m experiments.chunks
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.cells import Cells
from experiments.cli import USER_ERRORS, compose, fail, one_line
from experiments.config import DTYPES, ModelConfig, at_least, one_of
from experiments.figures import draw_chunks
from experiments.layer_bench import LayerSpec, has_deepspeed, live_peaks, paired_rounds, trace_layer
from experiments.records import Record, RecordFile, commit, open_output, versions
from upipe.kernels import KERNELS
from upipe.layout import padded_length
from upipe.schedule import HeadSchedule, valid_heads_per_stage
from upipe.testing import run_ranks

# Each variant is compared with the one that does the same work: equal recompute, or none.
PARTNERS = {"ulysses": "deepspeed", "upipe": "ulysses, checkpoint"}


@dataclass(frozen=True)
class RealConfig:
    """The part on real CPU ranks; see paper_configs/chunks.yaml."""

    ranks: int
    tokens: int
    hidden_size: int
    pairs: int
    pairs_per_start: int
    dtype: str
    seed: int
    heads_per_stage: list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden_size", "pairs_per_start"):
            at_least(f"real.{name}", getattr(self, name), 1)
        at_least("real.pairs", self.pairs, 0)
        one_of("real.dtype", self.dtype, DTYPES)
        _check_length("real.tokens", self.tokens, self.ranks)


@dataclass(frozen=True)
class TracedConfig:
    """The part traced under fake ranks; see paper_configs/chunks.yaml."""

    ranks: int
    kernel: str
    lengths: list[int] = field(default_factory=list)
    heads_per_stage: list[int] | None = None

    def __post_init__(self) -> None:
        at_least("traced.ranks", self.ranks, 1)
        one_of("traced.kernel", self.kernel, tuple(kernel.name for kernel in KERNELS))
        for length in self.lengths:
            at_least("traced.lengths", length, 1)
            _check_length("traced.lengths", length, self.ranks)


@dataclass(frozen=True)
class ChunksConfig:
    """The whole command."""

    model: ModelConfig
    real: RealConfig
    traced: TracedConfig
    out: str
    name: str


def _check_length(name: str, tokens: int, ranks: int) -> None:
    if tokens % ranks:
        raise ValueError(f"{name}={tokens} must be a multiple of {ranks} ranks; use {padded_length(tokens, ranks)}")


def main() -> None:
    try:
        config = compose("chunks", ChunksConfig)
        if config is not None:
            Chunks(config).run()
    except USER_ERRORS as caught:
        fail(one_line(caught))
    except KeyboardInterrupt:
        print("interrupted; the same command continues with what is left", file=sys.stderr)
        raise SystemExit(130) from None


class Chunks:
    """Cells to measure, in order; then records, tables and the picture from what was measured."""

    def __init__(self, config: ChunksConfig) -> None:
        self.config, model = config, config.model
        real, traced = config.real, config.traced
        doubling = [real.ranks * 2**i for i in range(32) if real.ranks * 2**i < model.heads]
        self.real_heads = real.heads_per_stage or [*doubling, model.heads]
        self.traced_heads = traced.heads_per_stage or list(valid_heads_per_stage(model.heads, traced.ranks))
        for ranks, values in ((real.ranks, self.real_heads), (traced.ranks, self.traced_heads)):
            for heads in values:
                HeadSchedule.build(model.heads, model.kv_heads, ranks, heads)  # raises now, with the valid values
        self.spec = LayerSpec(
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_size,
            hidden_size=real.hidden_size,
            tokens=real.tokens,
            heads_per_stage=tuple(self.real_heads),
            dtype=real.dtype,
            seed=real.seed,
            deepspeed=has_deepspeed() and model.kv_heads % real.ranks == 0,
        )
        self.out = open_output(config.out)
        relevant = {"model": asdict(model), "spec": asdict(self.spec), "ranks": [real.ranks, traced.ranks]}
        self.cells = Cells(self.out / "cells.jsonl", relevant | {"kernel": traced.kernel})

    def run(self) -> None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 120  # a file or a pipe
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        work = self._work()
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("", total=len(work))
            for key, measure in work.items():
                progress.update(task, description=key)
                if key not in self.cells:
                    self.cells.put(key, measure())
                progress.advance(task)
        records = self._records()
        records_path = self.out / "records.jsonl"
        records_path.unlink(missing_ok=True)
        for record in records:
            RecordFile(records_path).append(record)
        for table in (traced_table(records), real_table(records)):
            if table.row_count:
                console.print(table)
        draw_chunks(records, self.out / "chunks.png")
        console.print(f"records and picture are in {self.out}")

    def _work(self) -> dict[str, Callable[[], Any]]:
        config, real, traced = self.config, self.config.real, self.config.traced
        work: dict[str, Callable[[], Any]] = {}
        for tokens in traced.lengths:
            for heads in [*self.traced_heads, None]:
                work[traced_key(tokens, heads)] = lambda tokens=tokens, heads=heads: asdict(
                    trace_layer(config.model, traced.ranks, tokens, traced.kernel, heads)
                )
        if real.pairs:
            work["live peaks"] = lambda: run_ranks(live_peaks, real.ranks, self.spec, timeout_s=3600)[0]
        for first in range(0, real.pairs, real.pairs_per_start):
            count = min(real.pairs_per_start, real.pairs - first)
            work[f"pairs {first} to {first + count}"] = lambda first=first, count=count: run_ranks(
                paired_rounds, real.ranks, self.spec, first, count, timeout_s=3600
            )[0]
        return work

    def _records(self) -> list[Record]:
        shared = {
            "experiment": self.config.name,
            "model": self.config.model.name,
            "commit": commit(),
            "versions": versions(),
        }
        return [Record(**shared, **fields) for fields in [*self._traced_records(), *self._real_records()]]

    def _traced_records(self) -> list[dict[str, Any]]:
        model, traced, found = self.config.model, self.config.traced, []
        for tokens in traced.lengths:
            for heads in [*self.traced_heads, None]:
                cell = self.cells[traced_key(tokens, heads)]
                schedule = HeadSchedule.build(model.heads, model.kv_heads, traced.ranks, heads or model.heads)
                extra = {"variant": variant_name(heads), "heads_per_stage": heads or model.heads, "ranks": traced.ranks}
                base = {
                    "method": "ulysses" if heads is None else "upipe",
                    "hardware": "traced",
                    "length_tokens": tokens,
                }
                values = {
                    "peak_units_forward": cell["forward_bytes"] / cell["unit_bytes"],
                    "peak_units_backward": cell["backward_bytes"] / cell["unit_bytes"],
                    "peak_memory_gib": cell["backward_bytes"] / 2**30,
                    "heads_moved": schedule.heads_moved,
                }
                for quantity, value in values.items():
                    more = {"owners_bytes": cell["owners_at_peak"]} if quantity == "peak_memory_gib" else {}
                    found.append(base | {"quantity": quantity, "value": value, "extra": extra | more})
        return found

    def _real_records(self) -> list[dict[str, Any]]:
        real, found = self.config.real, []
        if not real.pairs:
            return found
        seconds: dict[str, list[float]] = {}
        for first in range(0, real.pairs, real.pairs_per_start):
            batch = self.cells[f"pairs {first} to {first + min(real.pairs_per_start, real.pairs - first)}"]
            for name, values in batch.items():
                seconds.setdefault(name, []).extend(values)
        peaks = self.cells["live peaks"]
        for name, values in seconds.items():
            method = name.split(",")[0]
            base = {"method": method, "hardware": "cpu", "length_tokens": real.tokens}
            extra: dict[str, Any] = {"variant": name, "ranks": real.ranks, "pairs": len(values)}
            partner = PARTNERS.get(method)
            if name == "ulysses, checkpoint":
                partner = None
            if partner in seconds:
                ratios = np.divide(values, seconds[partner])
                low, middle, high = np.percentile(ratios, [25, 50, 75])
                extra |= {"partner": partner, "ratio": float(middle), "ratio_quartiles": [float(low), float(high)]}
                extra |= {"peak_ratio": peaks[name] / peaks[partner]}
            quartiles = [1000 * float(q) for q in np.percentile(values, [25, 75])]
            found.append(
                base
                | {
                    "quantity": "time_ms",
                    "value": 1000 * float(np.median(values)),
                    "extra": extra | {"quartiles_ms": quartiles},
                }
            )
            found.append(base | {"quantity": "live_peak_bytes", "value": peaks[name], "extra": extra})
        return found


def traced_key(tokens: int, heads: int | None) -> str:
    return f"traced, {tokens} tokens, {variant_name(heads)}"


def variant_name(heads: int | None) -> str:
    return "ulysses" if heads is None else f"upipe, U = {heads}"


def traced_table(records: list[Record]) -> Table:
    """Peaks of forward and backward in units of x, and bytes, by variant and length."""
    traced = [record for record in records if record.hardware == "traced"]
    lengths = sorted({record.length_tokens for record in traced})
    table = Table(title="One attention layer, traced: peak beyond weights and their gradients (A = bytes of x)")
    table.add_column("variant")
    table.add_column("head-tensors", justify="right")
    for tokens in lengths:
        for quantity in ("forward A", "backward A", "GiB"):
            table.add_column(f"{tokens / 2**20:g}M {quantity}", justify="right")
    for variant in dict.fromkeys(record.get("variant") for record in traced):
        values = {
            (record.length_tokens, record.quantity): record.value
            for record in traced
            if record.get("variant") == variant
        }
        cells = [str(values[lengths[0], "heads_moved"])]
        for tokens in lengths:
            cells += [
                f"{values[tokens, quantity]:.2f}"
                for quantity in ("peak_units_forward", "peak_units_backward", "peak_memory_gib")
            ]
        table.add_row(str(variant), *cells)
    return table


def real_table(records: list[Record]) -> Table:
    """Times and live peaks on CPU ranks, each beside the variant that does the same work."""
    real = [record for record in records if record.hardware == "cpu"]
    table = Table(title="The same layer on CPU ranks, forward plus backward, paired runs")
    for name in ("variant", "median ms", "live peak MiB", "compared with", "time ratio (quartiles)", "peak ratio"):
        table.add_column(name, justify="left" if name in ("variant", "compared with") else "right")
    peaks = {record.get("variant"): record.value for record in real if record.quantity == "live_peak_bytes"}
    for record in real:
        if record.quantity != "time_ms":
            continue
        variant, extra = str(record.get("variant")), record.extra
        ratio, peak_ratio = "", ""
        if "partner" in extra:
            low, high = extra["ratio_quartiles"]
            ratio, peak_ratio = f"{extra['ratio']:.3f} ({low:.3f} to {high:.3f})", f"{extra['peak_ratio']:.2f}"
        table.add_row(
            variant,
            f"{record.value:.0f}",
            f"{peaks[variant] / 2**20:.1f}",
            str(extra.get("partner", "")),
            ratio,
            peak_ratio,
        )
    return table


if __name__ == "__main__":
    main()
