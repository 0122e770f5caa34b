"""What one rank does between the exchanges of a headwise layer: project, lay out by rank, collect, differentiate.

The stage loop that calls these steps is in headwise.py.

Letters: B batch, S tokens of this rank, T tokens of the whole sequence, H query heads, K KV heads, D head size,
d hidden size, n heads of a stage over all ranks, t tokens of a tile, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from upipe.collectives import ByRank, seq_to_head, sum_heads
from upipe.kernels import accumulate_dtype
from upipe.local_attention import HeldKV, LocalAttention
from upipe.memory.label import label
from upipe.projections import HeadProjection, Projections, TileSum, put_heads, take_heads
from upipe.rotary import Rotary
from upipe.schedule import HeadSchedule

HeadsByRank = Sequence[Sequence[int]]

# A token tile is bounded by the fp32 bytes of its widest rows and by a share of all heads' rows, so that its
# temporaries stay small beside the layer's own tensors at every length; below MIN_TILE_TOKENS a GEMM is slow.
TILE_BYTES = 256 * 2**20
TILE_SHARE = 8
MIN_TILE_TOKENS = 256
NORM_ROWS = 3  # rows of x in fp32 that a norm has alive at once


@dataclass(frozen=True, eq=False)
class Layer:
    """The arguments of :func:`headwise_attention` that are not differentiated, resolved."""

    local: LocalAttention
    group: dist.ProcessGroup | None
    rotary: Rotary | None
    positions: Tensor | None
    head_dim: int
    eps: float
    keep_attention: bool

    @property
    def schedule(self) -> HeadSchedule:
        """The stages."""
        return self.local.schedule


class RankPass:
    """One pass of one rank over the stages: its tokens, the weights, and the rotary tables of its positions.

    Args:
        layer: what is not differentiated.
        x: ``[B, S, d]``, this rank's tokens.
        proj: the weights.
        norm: applied to a tile ``[B, t, d]`` of x before it is projected; None projects x itself.
    """

    def __init__(
        self, layer: Layer, x: Tensor, proj: Projections, norm: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.layer, self.x, self.proj, self._norm = layer, x, proj, norm
        self.batch, self.tokens, self.hidden = x.shape
        self.wide = accumulate_dtype(x.dtype)
        self._tables: tuple[Tensor, Tensor] | None = None
        if layer.rotary is not None:
            assert layer.positions is not None
            with label("attn.rotary"):
                self._tables = layer.rotary.tables(layer.positions, self.wide)

    def rows(self, tokens: slice) -> Tensor:
        """Return what is projected, of a tile: ``[B, t, d]``."""
        return self.x[:, tokens] if self._norm is None else self._norm(self.x[:, tokens])

    def query_counts(self, index: int) -> list[int]:
        """Query heads of each rank in stage `index`."""
        return [len(heads) for heads in self.layer.schedule.stages[index].q_heads]

    def by_rank(self, buffer: Tensor, counts: Sequence[int]) -> ByRank:
        """Return a flat buffer as heads stored by rank."""
        return ByRank(buffer, tuple(counts), self.batch, self.tokens, self.layer.head_dim)

    def tiles(self, columns: int) -> Iterator[slice]:
        """Cut this rank's tokens into tiles whose rows have `columns` entries."""
        if self._norm is not None:
            columns = max(columns, NORM_ROWS * self.hidden)
        most = TILE_BYTES // (self.batch * columns * self.wide.itemsize)
        share = self.tokens * max(self.proj.o.shape) // (TILE_SHARE * columns)
        size = max(MIN_TILE_TOKENS, min(most, share))
        for start in range(0, self.tokens, size):
            yield slice(start, min(start + size, self.tokens))

    def input_tiles(self) -> Iterator[slice]:
        """Cut this rank's tokens into the tiles of :meth:`Gradients.through_input`."""
        schedule = self.layer.schedule
        return self.tiles((schedule.num_heads + 2 * schedule.num_kv_heads) * self.layer.head_dim)

    def rotation(self, tokens: slice) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of a tile, ``[t, R/2]`` or ``[B, t, R/2]``."""
        if self._tables is None:
            return None
        cos, sin = self._tables
        return cos[..., tokens, :], sin[..., tokens, :]

    def head_projection(self, name: str, heads: Sequence[int]) -> HeadProjection:
        """Return the projection `name` (q, k or v) of some heads."""
        head_dim = self.layer.head_dim
        bias = getattr(self.proj, f"{name}_bias")
        return HeadProjection(
            weight=take_heads(getattr(self.proj, name), heads, head_dim),
            bias=None if bias is None else take_heads(bias, heads, head_dim),
            norm=None if name == "v" else getattr(self.proj, f"{name}_norm"),
            eps=self.proj.eps,
            head_dim=head_dim,
        )

    def receive_q(self, index: int) -> Tensor:
        """Project and exchange the query heads of a stage: ``[B, T, heads of this rank, D]``."""
        shards = self._project(self.layer.schedule.stages[index].q_heads, ("q",))
        with label("attn.q"):
            return seq_to_head(shards, self.layer.group)

    def receive_kv(self, index: int, held: HeldKV) -> None:
        """Project and exchange K with V of the heads that arrive in a stage, and put them into `held`."""
        arriving = self.layer.schedule.stages[index].new_kv_heads
        if not any(arriving):
            return
        shards = self._project(arriving, ("k", "v"))
        with label("attn.kv"):
            kv = seq_to_head(shards, self.layer.group).unflatten(2, (2, -1))  # [B, T, 2, n, D]
        if arriving[self.layer.local.rank]:
            k, v = kv.unbind(2)
            held[index] = k, v

    def _project(self, heads_by_rank: HeadsByRank, names: Sequence[str]) -> ByRank:
        heads = sorted({head for heads in heads_by_rank for head in heads})
        spans = [
            slice(heads.index(of_rank[0]), heads.index(of_rank[-1]) + 1) if of_rank else slice(0, 0)
            for of_rank in heads_by_rank
        ]
        counts = [len(names) * len(of_rank) for of_rank in heads_by_rank]
        with label("exchange.send"):
            shards = ByRank.empty(self.x, counts, self.batch, self.tokens, self.layer.head_dim)
        with label("attn.tile"):
            for part, name in enumerate(names):
                projection = self.head_projection(name, heads)
                first = [part * len(of_rank) for of_rank in heads_by_rank]
                for tokens in self.tiles(len(heads) * self.layer.head_dim):
                    rotation = None if name == "v" else self.rotation(tokens)
                    shards.write(projection.forward(self.rows(tokens), rotation), tokens, spans, first)
        return shards

    def output(self, shards: list[ByRank]) -> Tensor:
        """Apply the output projection to the attention output of all stages: ``[B, S, d]``."""
        pieces = natural_order(shards)
        with label("attn.y"):
            y = self.x.new_empty(self.batch, self.tokens, self.hidden)
        with label("attn.tile"):
            for tokens in self.tiles(self.proj.o.shape[1]):
                y[:, tokens] = self.output_rows(pieces, tokens)
        return y

    def output_rows(self, pieces: list[Tensor], tokens: slice) -> Tensor:
        """Apply the output projection to a tile of all heads in order: ``[B, t, d]``."""
        return self.project_output(gather_rows(pieces, tokens))

    def project_output(self, out_rows: Tensor) -> Tensor:
        """Apply the output projection to ``[B*t, H*D]``: ``[B, t, d]``."""
        return F.linear(out_rows, self.proj.o, self.proj.o_bias).view(self.batch, -1, self.hidden)


def natural_order(shards: list[ByRank]) -> list[Tensor]:
    """Return views of all heads in order: a rank's range is contiguous, and so are its stages within it."""
    segments = [piece.segments() for piece in shards]
    return [of_stage[rank] for rank in range(len(segments[0])) for of_stage in segments]


def gather_rows(pieces: list[Tensor], tokens: slice) -> Tensor:
    """Return a tile of all heads, ``[B*t, H*D]``."""
    return torch.cat([piece[:, tokens] for piece in pieces], dim=2).flatten(2).flatten(0, 1)


class Gradients:
    """The gradients of a layer while its stages go by: of the weights, the sinks and the input."""

    def __init__(self, rank: RankPass, needs: dict[str, bool], sinks: Tensor | None) -> None:
        self.rank, self.needs = rank, needs
        self.weights: dict[str, Tensor] = {}
        with label("gradient"):
            self.sinks = torch.zeros_like(sinks) if sinks is not None and needs["sinks"] else None
            if needs["o"]:
                self.weights["o"] = torch.empty_like(rank.proj.o, memory_format=torch.contiguous_format)

    def output_gradient(self, index: int, dy: Tensor) -> ByRank:
        """Take dy ``[B, S, d]`` through the output projection of a stage, to the gradient of its attention output."""
        rank, head_dim = self.rank, self.rank.layer.head_dim
        heads_by_rank = rank.layer.schedule.stages[index].q_heads
        heads = [head for of_rank in heads_by_rank for head in of_rank]
        starts = [sum(map(len, heads_by_rank[:c])) for c in range(len(heads_by_rank))]
        spans = [slice(start, start + len(of_rank)) for start, of_rank in zip(starts, heads_by_rank, strict=True)]
        weight = take_heads(rank.proj.o, heads, head_dim, dim=1)  # [d, n*D]
        with label("exchange.send"):
            counts = rank.query_counts(index)
            dout_shards = ByRank.empty(rank.x, counts, rank.batch, rank.tokens, head_dim)
        with label("attn.tile"):
            for tokens in rank.tiles(max(weight.shape)):
                rows = (dy[:, tokens].flatten(0, 1) @ weight).view(rank.batch, -1, len(heads), head_dim)
                dout_shards.write(rows, tokens, spans, [0] * len(spans))
        return dout_shards

    def output_weights(self, index: int, dy: Tensor, out_shards: ByRank) -> None:
        """Find the gradients of o's columns of a stage, and in the first stage of its bias."""
        rank = self.rank
        heads = [head for of_rank in rank.layer.schedule.stages[index].q_heads for head in of_rank]
        sums = OutputSums(self, heads, bias=index == 0)
        pieces = out_shards.segments()
        with label("attn.tile"):
            for tokens in rank.tiles(max(rank.hidden, len(heads) * rank.layer.head_dim)) if sums.wanted else ():
                sums.add(dy[:, tokens].flatten(0, 1), gather_rows(pieces, tokens))
        sums.store()

    def output_sums(self) -> OutputSums:
        """Return the sums of all heads at once, for a caller with tiles of its own."""
        return OutputSums(self, range(self.rank.layer.schedule.num_heads), bias=True)

    def through_input(
        self,
        dq_shards: list[ByRank],
        dkv_shards: list[tuple[ByRank, HeadsByRank]],
        write: Callable[[slice, Tensor], None] | None,
    ) -> None:
        """Take dq, dk and dv of all heads through their projections, and find the gradients of the weights.

        Args:
            dq_shards: of every stage.
            dkv_shards: of every stage in which KV heads were done, with these heads by rank.
            write: called with each tile's tokens and the gradient ``[B, t, d]`` of the rows that were projected; None
                where nobody wants it.
        """
        rank, schedule = self.rank, self.rank.layer.schedule
        projections = {
            "q": rank.head_projection("q", range(schedule.num_heads)),
            "k": rank.head_projection("k", range(schedule.num_kv_heads)),
            "v": rank.head_projection("v", range(schedule.num_kv_heads)),
        }
        sums: dict[str, TileSum] = {
            name: TileSum() for name in Projections.tensor_names() if self.needs[name] and name[0] != "o"
        }
        collect = _collector(dq_shards, dkv_shards, schedule)
        with label("attn.tile"):
            for tokens in rank.input_tiles():
                rows, drows = rank.rows(tokens), None
                for name, projection in projections.items():
                    rotation = None if name == "v" else rank.rotation(tokens)
                    grad, dnorm = projection.backward(collect(name, tokens), rows, rotation)  # [B*t, heads*D]
                    self._add(sums, name, grad, rows, dnorm)
                    if write is not None:
                        weight = projection.weight
                        drows = grad @ weight if drows is None else drows.addmm_(grad, weight)
                if write is not None and drows is not None:
                    write(tokens, drows.view(rows.shape))
        with label("gradient"):
            for name, total in sums.items():
                self.weights[name] = total.result(getattr(rank.proj, name).dtype)

    def _add(self, sums: dict[str, TileSum], name: str, grad: Tensor, x_rows: Tensor, dnorm: Tensor | None) -> None:
        with label("gradient"):
            if name in sums:
                sums[name].add(grad.t() @ x_rows.flatten(0, 1))
            if f"{name}_bias" in sums:
                sums[f"{name}_bias"].add(grad.sum(0, dtype=self.rank.wide))
            if f"{name}_norm" in sums and dnorm is not None:
                sums[f"{name}_norm"].add(dnorm)


class OutputSums:
    """Gradients of the output projection's columns of some heads, and of its bias, over token tiles."""

    def __init__(self, grads: Gradients, heads: Sequence[int], *, bias: bool) -> None:
        self._grads, self._heads = grads, heads
        self._weight = TileSum() if grads.needs["o"] else None
        self._bias = TileSum() if bias and grads.needs["o_bias"] else None

    @property
    def wanted(self) -> bool:
        """Whether anything is summed."""
        return self._weight is not None or self._bias is not None

    def add(self, dy_rows: Tensor, out_rows: Tensor) -> None:
        """Add a tile: dy ``[B*t, d]``, the attention output of the heads ``[B*t, n*D]``."""
        with label("gradient"):
            if self._weight is not None:
                self._weight.add(dy_rows.t() @ out_rows)
            if self._bias is not None:
                self._bias.add(dy_rows.sum(0, dtype=self._grads.rank.wide))

    def store(self) -> None:
        """Round the sums and put them into the gradients."""
        rank = self._grads.rank
        with label("gradient"):
            if self._weight is not None:
                value = self._weight.result(rank.x.dtype)
                put_heads(self._grads.weights["o"], value, self._heads, rank.layer.head_dim, dim=1)
            if self._bias is not None:
                self._grads.weights["o_bias"] = self._bias.result(rank.x.dtype)


def _collector(
    dq_shards: list[ByRank], dkv_shards: list[tuple[ByRank, HeadsByRank]], schedule: HeadSchedule
) -> Callable[[str, slice], Tensor]:
    """Return a function of (q, k or v; tokens) that gathers ``[B, t, heads, D]`` from what the ranks returned."""
    queries = natural_order(dq_shards)
    kv_pieces: list[tuple[Sequence[int], Tensor]] = []
    for rank in range(schedule.ranks):
        for shards, done in dkv_shards:
            kv_pieces.append((done[rank], shards.segments()[rank].unflatten(2, (2, -1))))
    sent_once = sum(len(heads) for heads, _ in kv_pieces) == schedule.num_kv_heads

    def collect(name: str, tokens: slice) -> Tensor:
        if name == "q":
            return torch.cat([piece[:, tokens] for piece in queries], dim=2)
        pieces = [piece[:, tokens, "kv".index(name)] for _, piece in kv_pieces]
        if sent_once:
            return torch.cat(pieces, dim=2)
        return sum_heads(pieces, [heads for heads, _ in kv_pieces], schedule.num_kv_heads)

    return collect
