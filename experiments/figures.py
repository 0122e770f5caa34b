"""Pictures and tables from records.

python -m experiments.figures draws the picture of README.md and writes its tables, from docs/records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.records import Record, RecordFile, markdown_table

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "records" / "chunks.jsonl"

# Okabe and Ito's palette, which colour-blind readers can tell apart.
GROUPS = {
    "x, dy and dx": ("#999999", ("input", "attn.dx")),
    "q, k, v": ("#0072B2", ("attn.q", "attn.kv")),
    "attention output and its gradient": ("#56B4E9", ("attn.out", "attn.dout")),
    "dq, dk, dv": ("#009E73", ("attn.dqkv",)),
    "kernel workspace": ("#D55E00", ("kernel.workspace",)),
    "exchange buffers": ("#E69F00", ("exchange.send",)),
    "everything else": ("#CC79A7", ()),
}


def draw_chunks(records: Sequence[Record], path: Path) -> None:
    """Draw memory by owner at the longest traced length, and time against memory on real ranks."""
    traced = [record for record in records if record.hardware == "traced" and record.quantity == "peak_memory_gib"]
    timed = [record for record in records if record.quantity == "time_ms" and "ratio" in record.extra]
    parts = [part for part, found in ((_draw_owners, traced), (_draw_pairs, timed)) if found]
    if not parts:
        return
    with matplotlib.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.5, 4.2 * len(parts)), layout="constrained")
        for axes, part in zip(figure.subplots(len(parts), squeeze=False)[:, 0], parts, strict=True):
            part(axes, traced if part is _draw_owners else timed)
        figure.savefig(path, dpi=150)


def _draw_owners(axes: Axes, records: Sequence[Record]) -> None:
    longest = max(record.length_tokens for record in records)
    shown = [record for record in records if record.length_tokens == longest][::-1]
    grouped = {owner for _, owners in GROUPS.values() for owner in owners}
    left = [0.0] * len(shown)
    names = [_variant(record) for record in shown]
    for group, (colour, owners) in GROUPS.items():
        widths = []
        for record in shown:
            by_owner = record.extra["owners_bytes"]
            counted = owners or [owner for owner in by_owner if owner not in grouped]
            widths.append(sum(by_owner.get(owner, 0) for owner in counted) / 2**30)
        visible = max(widths) > 0
        axes.barh(names, widths, left=left, color=colour, label=group if visible else None, height=0.65)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.annotate(f"{total:.1f}", (total, name), xytext=(4, 0), textcoords="offset points", va="center")
    record = shown[0]
    axes.set_xlabel("GiB at the peak of backward, beyond weights and their gradients")
    axes.set_title(
        f"{record.model}: one attention layer, {longest / 2**20:g}M tokens, one of {record.extra['ranks']} GPUs",
        loc="left",
    )
    axes.set_xlim(0, max(left) * 1.08)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.17), ncols=3, frameon=False, fontsize=9)


def _draw_pairs(axes: Axes, records: Sequence[Record]) -> None:
    shown = [record for record in records if record.method == "upipe"]
    position = range(len(shown))
    ratios = [record.extra["ratio"] for record in shown]
    low, high = (
        [abs(record.extra["ratio_quartiles"][side] - ratio) for record, ratio in zip(shown, ratios, strict=True)]
        for side in (0, 1)
    )
    axes.errorbar(position, ratios, yerr=[low, high], fmt="o-", color="#D55E00", capsize=4, label="time")
    peaks = [record.extra["peak_ratio"] for record in shown]
    axes.plot(position, peaks, "s-", color="#0072B2", label="live peak")
    axes.axhline(1, color="#999999", linestyle=":", zorder=0)
    axes.set_xticks(list(position), [str(record.extra["variant"]).removeprefix("upipe, ") for record in shown])
    axes.set_ylim(0, max(1.1, *(ratio + error for ratio, error in zip(ratios, high, strict=True))) * 1.05)
    axes.set_ylabel("ratio to plain Ulysses\nunder checkpoint")
    axes.set_xlabel("query heads per stage, over all ranks")
    record = shown[0]
    axes.set_title(
        f"The same heads on {record.extra['ranks']} CPU ranks, {record.length_tokens} tokens: "
        f"median and quartiles of {record.extra['pairs']} paired runs",
        loc="left",
        fontsize=11,
    )
    axes.legend(frameon=False)


def _variant(record: Record) -> str:
    name = str(record.extra["variant"])
    return "plain Ulysses" if name == "ulysses" else name.replace("upipe, ", "UPipe, ")


def readme_tables(records: Sequence[Record]) -> dict[str, str]:
    """Return the tables of README.md by name, as Markdown."""
    return {"traced": _traced_markdown(records), "real": _real_markdown(records)}


def _traced_markdown(records: Sequence[Record]) -> str:
    traced = [record for record in records if record.hardware == "traced"]
    lengths = sorted({record.length_tokens for record in traced})
    values = {(record.extra["variant"], record.length_tokens, record.quantity): record.value for record in traced}
    header = ["", "head-tensors exchanged", "forward, A", "backward, A"]
    header += [f"GiB at {tokens / 2**20:g}M tokens" for tokens in lengths]
    rows = []
    for record in traced:
        if record.quantity == "peak_memory_gib" and record.length_tokens == lengths[-1]:
            name = record.extra["variant"]
            units = [values[name, lengths[-1], f"peak_units_{way}"] for way in ("forward", "backward")]
            gib = [values[name, tokens, "peak_memory_gib"] for tokens in lengths]
            moved = values[name, lengths[-1], "heads_moved"]
            rows.append([_variant(record), str(moved), *(f"{value:.2f}" for value in units + gib)])
    return markdown_table(header, rows)


def _real_markdown(records: Sequence[Record]) -> str:
    header = ["", "compared with", "time ratio, median (quartiles)", "live peak ratio"]
    rows = []
    for record in records:
        if record.quantity == "time_ms" and "ratio" in record.extra:
            low, high = record.extra["ratio_quartiles"]
            ratio = f"{record.extra['ratio']:.2f} ({low:.2f} to {high:.2f})"
            rows.append([_variant(record), str(record.extra["partner"]), ratio, f"{record.extra['peak_ratio']:.2f}"])
    return markdown_table(header, rows)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Return `text` with what stands between ``<!-- table: name -->`` and ``<!-- end -->`` replaced."""
    for name, table in tables.items():
        before, found, rest = text.partition(f"<!-- table: {name} -->\n")
        if not found:
            raise ValueError(f"no '<!-- table: {name} -->' in the text")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{found}{table.rstrip()}\n{end}{after}"
    return text


def main() -> None:
    records = RecordFile(RECORDS).read()
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(), readme_tables(records)))
    owners = [record for record in records if record.hardware == "traced"]
    draw_chunks(owners, ROOT / "docs" / "memory.png")
    print(f"README.md and docs/memory.png are written from {len(records)} records")


if __name__ == "__main__":
    main()
