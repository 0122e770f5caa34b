"""Untied Ulysses: an attention layer whose heads go through in stages, each with its own exchanges.

A stage projects U heads, exchanges them for tokens, attends, and exchanges the output back. Forward keeps only its
input; backward recomputes a stage and runs that stage's backward at once, so that q, k, v, the attention output's
gradient and the exchange buffers exist for U heads at a time, never for all.

Where this differs from the paper (arXiv 2602.21196): the layer owns its projections in backward too, so dq, dk and dv
wait, sequence-sharded, for one GEMM each, instead of adding dx in bf16 once a stage; the output projection is applied
once; K and V gradients are summed in fp32; and any number of heads, KV heads, ranks and heads per stage will do.

Letters: B batch, S tokens of this rank, T = C*S, C ranks, H query heads, K KV heads, D head size, d hidden size,
n heads of a stage over all ranks, t tokens of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe.collectives import ByRank, group_rank, group_size, head_to_seq, seq_to_head, sum_heads
from upipe.kernels import accumulate_dtype, select_kernel
from upipe.local_attention import HeldKV, KVGradients, LocalAttention
from upipe.mask import AttentionMask
from upipe.memory.label import label
from upipe.projections import HeadProjection, Projections, TileSum, put_heads, take_heads
from upipe.rotary import Rotary
from upipe.schedule import HeadSchedule

HeadsByRank = Sequence[Sequence[int]]

# A token tile is bounded by the fp32 bytes of its widest rows and by a share of the sequence, so that its temporaries
# stay small beside a stage's buffers at every length.
TILE_BYTES = 64 * 2**20
TILE_SHARE = 16
MIN_TILE_TOKENS = 128


def headwise_attention(
    x: Tensor,
    proj: Projections,
    *,
    group: dist.ProcessGroup | None,
    num_heads: int,
    num_kv_heads: int,
    heads_per_stage: int | None = None,
    positions: Tensor | None = None,
    rotary: Rotary | None = None,
    mask: AttentionMask,
    scale: float | None = None,
    kernel: str = "auto",
    keep_attention: bool = False,
) -> Tensor:
    """Run a whole attention layer, U heads at a time, over a sequence that is sharded over the ranks of `group`.

    Equals projection, norm, rotary, attention over the whole sequence and output projection on one device. Gradients
    of the weights are those of this rank's tokens: sum them over the ranks.

    Args:
        x: ``[B, S, d]``, this rank's contiguous S tokens, S equal on all ranks.
        proj: the weights; any of them may be frozen.
        group: the C ranks that share the sequence; None is this process alone, without torch.distributed.
        num_heads: H, a multiple of K.
        num_kv_heads: K.
        heads_per_stage: U; None takes C. See :meth:`HeadSchedule.build` for the valid values.
        positions: integers ``[S]`` or ``[B, S]``, positions of this rank's tokens in the whole sequence (from 0 again in
            each document); None counts on from the ranks before. Used by `rotary` only.
        rotary: applied to q and k before the exchange; None for none.
        mask: in positions of the whole sequence; sinks for all H heads.
        scale: of the logits; None is ``1 / sqrt(D)``.
        kernel: "auto", "flash", "sdpa", "blocked" or "reference".
        keep_attention: keep the attention output and lse for backward, which then skips the attention recompute.

    Returns:
        ``[B, S, d]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an invalid U, a mask that does not fit the sequence, or a
            kernel that cannot do it; before the first exchange and alike on every rank.

    Cost: forward keeps x (with `keep_attention` also ``[B, S, H, D]`` and ``[B, H/C, T]`` in fp32). For Llama3-8B on 8
    ranks, in units of x: at most 3.5 in forward, 6.4 in backward at U = C (tests/upipe/test_headwise_memory.py).
    Exchanges 2(H + K) head-tensors in forward, 4(H + K) in backward.

    Reference: Untied Ulysses, arXiv 2602.21196.

    >>> x, weight = torch.randn(1, 6, 8), torch.randn(8, 8)
    >>> proj = Projections(q=weight, k=weight[:4], v=weight[4:], o=weight)
    >>> y = headwise_attention(x, proj, group=None, num_heads=4, num_kv_heads=2, mask=AttentionMask())
    >>> y.shape
    torch.Size([1, 6, 8])
    """
    if x.dim() != 3:
        raise ValueError(f"x must be [B, S, d], got {list(x.shape)}")
    if torch.is_autocast_enabled(x.device.type):
        x, proj = _cast(x, proj, torch.get_autocast_dtype(x.device.type))
    head_dim = proj.check(x, num_heads=num_heads, num_kv_heads=num_kv_heads)
    ranks, rank = group_size(group), group_rank(group)
    mask.check(batch=x.shape[0], tokens=ranks * x.shape[1], num_heads=num_heads)
    layer = Layer(
        local=LocalAttention(
            schedule=HeadSchedule.build(num_heads, num_kv_heads, ranks, heads_per_stage),
            rank=rank,
            kernel=select_kernel(kernel, mask, x.new_empty(0, head_dim)),
            mask=mask.with_sinks(None),
            scale=1 / math.sqrt(head_dim) if scale is None else scale,
        ),
        group=group,
        rotary=rotary,
        positions=_positions(x, positions, rotary, head_dim, rank),
        head_dim=head_dim,
        eps=proj.eps,
        keep_attention=keep_attention,
    )
    y: Tensor = _Headwise.apply(layer, x, mask.sinks, *proj.tensors())
    return y


def _cast(x: Tensor, proj: Projections, dtype: torch.dtype) -> tuple[Tensor, Projections]:
    """Cast as autocast does for a linear; norms stay as they are, being computed in fp32."""
    names = Projections.tensor_names()
    tensors = [
        tensor if tensor is None or name.endswith("norm") else tensor.to(dtype)
        for name, tensor in zip(names, proj.tensors(), strict=True)
    ]
    return x.to(dtype), Projections.of(tensors, proj.eps)


def _positions(x: Tensor, positions: Tensor | None, rotary: Rotary | None, head_dim: int, rank: int) -> Tensor | None:
    batch, tokens, _ = x.shape
    if rotary is None:
        if positions is not None:
            raise ValueError("positions are used by rotary only; pass rotary=Rotary(...) or leave positions out")
        return None
    if rotary.head_dim != head_dim:
        raise ValueError(f"rotary is for head_dim={rotary.head_dim} but the weights have head_dim={head_dim}")
    if positions is None:
        return torch.arange(rank * tokens, (rank + 1) * tokens, device=x.device)
    if tuple(positions.shape) not in ((tokens,), (batch, tokens)) or positions.is_floating_point():
        raise ValueError(
            f"positions must be integers [{tokens}] or [{batch}, {tokens}] for x {list(x.shape)}; "
            f"got {positions.dtype} {list(positions.shape)}"
        )
    if positions.device != x.device:
        raise ValueError(f"positions are on {positions.device} but x is on {x.device}; move one of them")
    return positions


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


class _Headwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, sinks: Tensor | None, *weights: Tensor | None) -> Tensor:
        layer = replace(layer, local=layer.local.with_sinks(sinks))
        with torch.autocast(x.device.type, enabled=False):
            rank = RankPass(layer, x, Projections.of(weights, layer.eps))
            kept, held = [], HeldKV()
            shards = []
            for index in range(len(layer.schedule.stages)):
                rank.receive_kv(index, held)
                q = rank.receive_q(index)
                with label("attn.out"):
                    out, lse = layer.local.forward(index, q, held)
                    del q
                    shards.append(head_to_seq(out, rank.query_counts(index), layer.group))
                    del out
                kept.append(lse)
                held = layer.local.still_needed(index, held)
            y = rank.output(shards)
        saved = [piece.buffer for piece in shards] + kept if layer.keep_attention else []
        ctx.save_for_backward(x, sinks, *weights, *saved)
        ctx.layer = layer
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        names = Projections.tensor_names()
        x, sinks, *rest = ctx.saved_tensors
        weights, saved = rest[: len(names)], rest[len(names) :]
        layer = replace(ctx.layer, local=ctx.layer.local.with_sinks(sinks))
        needs = dict(zip(("x", "sinks", *names), ctx.needs_input_grad[1:], strict=True))
        with torch.autocast(x.device.type, enabled=False):
            rank = RankPass(layer, x, Projections.of(weights, layer.eps))
            grads = Gradients(rank, needs, sinks)
            num_stages = len(layer.schedule.stages)
            held: HeldKV = {}
            dkv = KVGradients(layer.schedule, layer.local.rank)
            dq_shards, dkv_shards = [], []
            for index in range(num_stages):
                rank.receive_kv(index, held)
                q = rank.receive_q(index)
                if layer.keep_attention:
                    lse = saved[num_stages + index]
                    out_shards = rank.by_rank(saved[index], rank.query_counts(index))
                    with label("attn.out"):
                        out = seq_to_head(out_shards, layer.group)
                else:
                    with label("attn.out"):
                        out, lse = layer.local.forward(index, q, held)
                        out_shards = head_to_seq(out, rank.query_counts(index), layer.group)
                dout_shards = grads.through_output(index, dy, out_shards)
                del out_shards
                with label("attn.dout"):
                    dout = seq_to_head(dout_shards, layer.group)
                    del dout_shards
                if needs["sinks"]:
                    layer.local.sink_gradient(index, dout, out, lse, grads.sinks)
                with label("attn.dqkv"):
                    dq = layer.local.backward(index, dout, q, held, out, lse, dkv)
                    del q, out, lse, dout
                    dq_shards.append(head_to_seq(dq, rank.query_counts(index), layer.group))
                    done = layer.schedule.done_kv_heads(index)
                    if any(done):
                        packed = dkv.take(done[layer.local.rank], dq).flatten(2, 3)
                        dkv_shards.append((head_to_seq(packed, [2 * len(heads) for heads in done], layer.group), done))
                        del packed
                    del dq
                held = layer.local.still_needed(index, held)
            dx = grads.through_input(dq_shards, dkv_shards)
        return None, dx, grads.sinks, *(grads.weights.get(name) for name in names)


class RankPass:
    """One pass of one rank over the stages: its tokens, the weights, and the rotary tables of its positions."""

    def __init__(self, layer: Layer, x: Tensor, proj: Projections) -> None:
        self.layer, self.x, self.proj = layer, x, proj
        self.batch, self.tokens, self.hidden = x.shape
        self.wide = accumulate_dtype(x.dtype)
        self._tables: tuple[Tensor, Tensor] | None = None
        if layer.rotary is not None:
            assert layer.positions is not None
            with label("attn.rotary"):
                self._tables = layer.rotary.tables(layer.positions, self.wide)

    def query_counts(self, index: int) -> list[int]:
        """Query heads of each rank in stage `index`."""
        return [len(heads) for heads in self.layer.schedule.stages[index].q_heads]

    def by_rank(self, buffer: Tensor, counts: Sequence[int]) -> ByRank:
        """Return a flat buffer as heads stored by rank."""
        return ByRank(buffer, tuple(counts), self.batch, self.tokens, self.layer.head_dim)

    def tiles(self, columns: int) -> Iterator[slice]:
        """Cut this rank's tokens into tiles whose rows have `columns` entries."""
        most = TILE_BYTES // (self.batch * columns * self.wide.itemsize)
        size = max(MIN_TILE_TOKENS, min(most, -(-self.tokens // TILE_SHARE)))
        for start in range(0, self.tokens, size):
            yield slice(start, min(start + size, self.tokens))

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
            held[index] = kv

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
                    shards.write(projection.forward(self.x[:, tokens], rotation), tokens, spans, first)
        return shards

    def output(self, shards: list[ByRank]) -> Tensor:
        """Apply the output projection to the attention output of all stages: ``[B, S, d]``."""
        pieces = natural_order(shards)
        with label("attn.y"):
            y = self.x.new_empty(self.batch, self.tokens, self.hidden)
        with label("attn.tile"):
            for tokens in self.tiles(self.proj.o.shape[1]):
                rows = torch.cat([piece[:, tokens] for piece in pieces], dim=2).flatten(2)
                y[:, tokens] = F.linear(rows, self.proj.o, self.proj.o_bias)
        return y


def natural_order(shards: list[ByRank]) -> list[Tensor]:
    """Return views of all heads in order: a rank's range is contiguous, and so are its stages within it."""
    segments = [piece.segments() for piece in shards]
    return [of_stage[rank] for rank in range(len(segments[0])) for of_stage in segments]


class Gradients:
    """The gradients of a layer while its stages go by: of the weights, the sinks and the input."""

    def __init__(self, rank: RankPass, needs: dict[str, bool], sinks: Tensor | None) -> None:
        self.rank, self.needs = rank, needs
        self.weights: dict[str, Tensor] = {}
        with label("gradient"):
            self.sinks = torch.zeros_like(sinks) if sinks is not None and needs["sinks"] else None
            if needs["o"]:
                self.weights["o"] = torch.empty_like(rank.proj.o, memory_format=torch.contiguous_format)

    def through_output(self, index: int, dy: Tensor, out_shards: ByRank) -> ByRank:
        """Take dy ``[B, S, d]`` through the output projection of a stage; add to the gradients of o and its bias."""
        rank, head_dim = self.rank, self.rank.layer.head_dim
        heads_by_rank = rank.layer.schedule.stages[index].q_heads
        heads = [head for of_rank in heads_by_rank for head in of_rank]
        starts = [sum(map(len, heads_by_rank[:c])) for c in range(len(heads_by_rank))]
        spans = [slice(start, start + len(of_rank)) for start, of_rank in zip(starts, heads_by_rank, strict=True)]
        weight = take_heads(rank.proj.o, heads, head_dim, dim=1)  # [d, n*D]
        with label("exchange.send"):
            dout_shards = ByRank.empty(rank.x, out_shards.counts, rank.batch, rank.tokens, head_dim)
        pieces, weight_sum, bias_sum = out_shards.segments(), TileSum(), TileSum()
        wants_bias = self.needs["o_bias"] and index == 0
        with label("attn.tile"):
            for tokens in rank.tiles(max(weight.shape)):
                dy_rows = dy[:, tokens]
                rows = torch.matmul(dy_rows, weight).unflatten(-1, (-1, head_dim))
                dout_shards.write(rows, tokens, spans, [0] * len(spans))
                if self.needs["o"]:
                    out_rows = torch.cat([piece[:, tokens] for piece in pieces], dim=2).flatten(2).flatten(0, 1)
                    with label("gradient"):
                        weight_sum.add(dy_rows.flatten(0, 1).t() @ out_rows)
                if wants_bias:
                    bias_sum.add(dy_rows.sum((0, 1), dtype=rank.wide))
        with label("gradient"):
            if self.needs["o"]:
                put_heads(self.weights["o"], weight_sum.result(rank.x.dtype), heads, head_dim, dim=1)
            if wants_bias:
                self.weights["o_bias"] = bias_sum.result(rank.x.dtype)
        return dout_shards

    def through_input(self, dq_shards: list[ByRank], dkv_shards: list[tuple[ByRank, HeadsByRank]]) -> Tensor | None:
        """Take dq, dk and dv of all heads through their projections: dx ``[B, S, d]`` and the gradients of weights."""
        rank, schedule = self.rank, self.rank.layer.schedule
        projections = {
            "q": rank.head_projection("q", range(schedule.num_heads)),
            "k": rank.head_projection("k", range(schedule.num_kv_heads)),
            "v": rank.head_projection("v", range(schedule.num_kv_heads)),
        }
        sums: dict[str, TileSum] = {name: TileSum() for name in Projections.tensor_names() if self.needs[name]}
        collect = _collector(dq_shards, dkv_shards, schedule)
        with label("attn.dx"):
            dx = torch.empty_like(rank.x, memory_format=torch.contiguous_format) if self.needs["x"] else None
        with label("attn.tile"):
            for tokens in rank.tiles((schedule.num_heads + 2 * schedule.num_kv_heads) * rank.layer.head_dim):
                x_rows = rank.x[:, tokens]
                dx_rows = None
                for name, projection in projections.items():
                    rotation = None if name == "v" else rank.rotation(tokens)
                    grad, dnorm = projection.backward(collect(name, tokens), x_rows, rotation)  # [B*t, heads*D]
                    self._add(sums, name, grad, x_rows, dnorm)
                    if dx is not None:
                        dx_rows = (
                            grad @ projection.weight if dx_rows is None else dx_rows.addmm_(grad, projection.weight)
                        )
                if dx is not None and dx_rows is not None:
                    dx[:, tokens] = dx_rows.view(x_rows.shape)
        with label("gradient"):
            for name, total in sums.items():
                if name not in ("o", "o_bias"):
                    weight = getattr(rank.proj, name)
                    self.weights[name] = total.result(weight.dtype)
        return dx

    def _add(self, sums: dict[str, TileSum], name: str, grad: Tensor, x_rows: Tensor, dnorm: Tensor | None) -> None:
        with label("gradient"):
            if name in sums:
                sums[name].add(grad.t() @ x_rows.flatten(0, 1))
            if f"{name}_bias" in sums:
                sums[f"{name}_bias"].add(grad.sum(0, dtype=self.rank.wide))
            if f"{name}_norm" in sums and dnorm is not None:
                sums[f"{name}_norm"].add(dnorm)


def _collector(dq_shards: list[ByRank], dkv_shards: list[tuple[ByRank, HeadsByRank]], schedule: HeadSchedule) -> Any:
    """Return a function of (q, k or v; tokens) that gathers a tile ``[B, t, heads, D]`` from what the ranks returned."""
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
