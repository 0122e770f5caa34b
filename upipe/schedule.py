"""Which heads run when, and on which rank: plain integers, no torch.

Letters: H query heads, K key/value heads, g = H/K query heads per KV head, C ranks, U heads per stage.

The schedule is data. A scheme reads it and does what it says; a test reads it without starting a process. Every rank
builds the whole schedule, so the split sizes of an exchange are known on both sides without asking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise


def valid_heads_per_stage(num_heads: int, ranks: int) -> tuple[int, ...]:
    """Return the values of U a schedule accepts: C, 2C, ... below H, and H itself.

    >>> valid_heads_per_stage(8, 2)
    (2, 4, 6, 8)
    >>> valid_heads_per_stage(3, 4)
    (3,)
    """
    return (*range(ranks, num_heads, ranks), num_heads)


def balanced_split(length: int, parts: int) -> list[range]:
    """Cut ``range(length)`` into `parts` runs whose lengths differ by one at most, the longer ones first."""
    short, longer = divmod(length, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@dataclass(frozen=True)
class KernelCall:
    """One call of a local kernel, with equally many query heads for each of its KV heads.

    Args:
        q_heads: a slice of the rank's query heads of the stage.
        kv_heads: a slice of the KV heads that arrived together in stage `arrival`.
        arrival: the stage in which K and V of this call arrived.
    """

    q_heads: slice
    kv_heads: slice
    arrival: int


@dataclass(frozen=True)
class Stage:
    """One stage: project, exchange, attend, exchange back. Each field holds one tuple of heads for each rank.

    Args:
        q_heads: the query heads a rank attends with.
        kv_heads: the KV heads it needs for that.
        new_kv_heads: those of them that arrive in this stage; the others stayed from an earlier one.
    """

    q_heads: tuple[tuple[int, ...], ...]
    kv_heads: tuple[tuple[int, ...], ...]
    new_kv_heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeadSchedule:
    """The heads of every stage and rank. Make one with :meth:`build`.

    >>> print(HeadSchedule.build(4, 2, 2))
    4 query heads, 2 KV heads, 2 ranks, U = 2: 2 stages, 12 head-tensors exchanged in a forward
    stage | rank 0    rank 1
        0 | q0  +kv0  q2  +kv1
        1 | q1   kv0  q3   kv1
    +kv: K and V of this head arrive; kv: they are still here from an earlier stage
    """

    num_heads: int
    num_kv_heads: int
    ranks: int
    heads_per_stage: int
    stages: tuple[Stage, ...]

    @classmethod
    def build(cls, num_heads: int, num_kv_heads: int, ranks: int, heads_per_stage: int | None = None) -> HeadSchedule:
        """Schedule H query heads over C ranks, U at a time.

        Rank r owns the contiguous, balanced range of query heads that plain Ulysses gives it; a stage takes the next
        ceil(U/C) of every rank's range at most. A range is cut evenly over the stages, so that a rank sits out a stage
        only when it owns fewer heads than there are stages. For K = C and U = C this is the GQA schedule of
        Untied Ulysses (arXiv 2602.21196), head r*g + s on rank r in stage s; U = H is plain Ulysses.

        Args:
            num_heads: H, a multiple of K.
            num_kv_heads: K.
            ranks: C, the context-parallel degree.
            heads_per_stage: U, over all ranks; None takes C (H when H < C).

        Raises:
            ValueError: H is not a multiple of K, a count is below one, or U is not one of
                :func:`valid_heads_per_stage`.
        """
        for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("ranks", ranks)):
            if count < 1:
                raise ValueError(f"{name}={count} must be at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}; "
                f"valid KV heads: {', '.join(str(k) for k in range(1, num_heads + 1) if num_heads % k == 0)}"
            )
        valid = valid_heads_per_stage(num_heads, ranks)
        if heads_per_stage is None:
            heads_per_stage = valid[0]
        if heads_per_stage not in valid:
            raise ValueError(
                f"heads_per_stage={heads_per_stage} must be a multiple of {ranks} (context-parallel ranks) below "
                f"{num_heads}, or {num_heads} itself; valid for {num_heads} heads: {', '.join(map(str, valid))}"
            )
        owned = balanced_split(num_heads, ranks)
        per_stage = -(-heads_per_stage // ranks)
        num_stages = -(-len(owned[0]) // per_stage)
        # Indexed by rank, then stage.
        q_heads = [[tuple(heads[i] for i in run) for run in balanced_split(len(heads), num_stages)] for heads in owned]
        group = num_heads // num_kv_heads
        kv_heads = [[tuple(sorted({head // group for head in heads})) for heads in row] for row in q_heads]

        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            ranks=ranks,
            heads_per_stage=heads_per_stage,
            stages=tuple(
                Stage(
                    q_heads=tuple(row[s] for row in q_heads),
                    kv_heads=tuple(row[s] for row in kv_heads),
                    new_kv_heads=tuple(_without(row[s], row[s - 1] if s else ()) for row in kv_heads),
                )
                for s in range(num_stages)
            ),
        )

    @property
    def heads_moved(self) -> int:
        """Head-tensors exchanged in one forward: every query head and its output once, K and V once per send."""
        kv_sends = sum(len(heads) for stage in self.stages for heads in stage.new_kv_heads)
        return 2 * self.num_heads + 2 * kv_sends

    def done_kv_heads(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return, by rank, the KV heads of stage `index` that no later stage needs: their gradients leave then."""
        kv_heads = self.stages[index].kv_heads
        later = self.stages[index + 1].kv_heads if index + 1 < len(self.stages) else ((),) * self.ranks
        return tuple(map(_without, kv_heads, later))

    def kernel_calls(self, index: int, rank: int) -> list[KernelCall]:
        """Cut a rank's heads of stage `index` into kernel calls.

        The KV heads of a call arrived together, so they lie in one buffer, and have equally many query heads.
        """
        group = self.num_heads // self.num_kv_heads
        stage = self.stages[index]

        def arrival(head: int) -> int:
            return max(s for s in range(index + 1) if head in self.stages[s].new_kv_heads[rank])

        runs = groupby(
            stage.kv_heads[rank],
            key=lambda head: (arrival(head), sum(q // group == head for q in stage.q_heads[rank])),
        )
        calls, q_start = [], 0
        for (came, count), run in runs:
            heads = list(run)
            first = self.stages[came].new_kv_heads[rank].index(heads[0])
            q_stop = q_start + count * len(heads)
            calls.append(KernelCall(slice(q_start, q_stop), slice(first, first + len(heads)), came))
            q_start = q_stop
        return calls

    def __str__(self) -> str:
        cells = [
            [
                _runs(stage.q_heads[rank], "q") + "  " + _kv_cell(stage.kv_heads[rank], stage.new_kv_heads[rank])
                if stage.q_heads[rank]
                else "-"
                for rank in range(self.ranks)
            ]
            for stage in self.stages
        ]
        header = [f"rank {rank}" for rank in range(self.ranks)]
        width = max(len(cell) for row in [header, *cells] for cell in row)
        lines = [
            f"{self.num_heads} query heads, {self.num_kv_heads} KV heads, {self.ranks} ranks, "
            f"U = {self.heads_per_stage}: {len(self.stages)} stages, "
            f"{self.heads_moved} head-tensors exchanged in a forward",
        ]
        for name, row in [("stage", header), *((f"{s:5}", row) for s, row in enumerate(cells))]:
            lines.append(f"{name} | " + "  ".join(cell.ljust(width) for cell in row))
        lines.append("+kv: K and V of this head arrive; kv: they are still here from an earlier stage")
        return "\n".join(line.rstrip() for line in lines)


def _without(heads: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(head for head in heads if head not in others)


def _runs(heads: tuple[int, ...], prefix: str) -> str:
    if len(heads) > 1 and heads[-1] - heads[0] == len(heads) - 1:
        return f"{prefix}{heads[0]}-{heads[-1]}"
    return prefix + ",".join(map(str, heads))


def _kv_cell(kv_heads: tuple[int, ...], new: tuple[int, ...]) -> str:
    stayed = _without(kv_heads, new)
    parts = [" " + _runs(stayed, "kv")] if stayed else []
    if new:
        parts.append("+" + _runs(new, "kv"))
    return " ".join(parts)
