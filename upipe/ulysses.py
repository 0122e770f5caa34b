"""Plain Ulysses attention: all heads exchanged at once. The baseline of this package.

Reference: DeepSpeed-Ulysses, arXiv 2309.14509. Letters: B batch, S tokens of this rank, T = C*S, C ranks, H query
heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe.collectives import ByRank, group_rank, group_size, head_to_seq, seq_to_head, sum_heads
from upipe.kernels import select_kernel
from upipe.local_attention import LocalAttention
from upipe.mask import AttentionMask
from upipe.memory.label import label
from upipe.schedule import HeadSchedule


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None,
    mask: AttentionMask,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attend over a sequence that is sharded over the ranks of `group`, exactly.

    Equals attention over the whole sequence on one device. Heads are exchanged for tokens, each rank attends with its
    share of the heads over all tokens, and the output is exchanged back. Any H, K (H a multiple of K) and C: with
    K < C a KV head goes to every rank that needs it and its gradients are summed.

    Args:
        q: ``[B, S, H, D]``, this rank's contiguous S tokens; rotary, if any, already applied.
        k: ``[B, S, K, D]``.
        v: ``[B, S, K, D]``.
        group: the C ranks that share the sequence; None is this process alone, without torch.distributed.
        mask: in positions of the whole sequence; sinks for all H heads.
        scale: of the logits; None is ``1 / sqrt(D)``.
        kernel: "auto", "flash", "sdpa", "blocked" or "reference".

    Returns:
        ``[B, S, H, D]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a mask that does not fit the sequence, or an explicit
            kernel that cannot do it; before the first exchange.

    Cost: saves q, k, v, the output and lse, head-sharded; exchanges 2(H + K) head-tensors in forward and in backward.

    >>> q, kv = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> ulysses_attention(q, kv, kv, group=None, mask=AttentionMask()).shape
    torch.Size([1, 6, 4, 8])
    """
    for name, tensor in (("k", k), ("v", v)):
        if q.dim() != 4 or tensor.shape != (*q.shape[:2], tensor.shape[-2], q.shape[3]) or tensor.shape != k.shape:
            raise ValueError(
                "q must be [B, S, H, D], k and v [B, S, K, D]; "
                f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} but q is {q.dtype} on {q.device}; convert one of them"
            )
    if not q.numel():
        raise ValueError(f"q must hold at least one token, got {list(q.shape)}")
    ranks, rank = group_size(group), group_rank(group)
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    mask.check(batch=q.shape[0], tokens=ranks * q.shape[1], num_heads=num_heads)
    local = LocalAttention(
        schedule=HeadSchedule.build(num_heads, num_kv_heads, ranks, num_heads),
        rank=rank,
        kernel=select_kernel(kernel, mask, q),
        mask=mask.with_sinks(None),
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
    )
    stage = local.schedule.stages[0]
    queries, keys = Shares(stage.q_heads, num_heads, group), Shares(stage.kv_heads, num_kv_heads, group)
    with label("attn.q"):
        q = _ToHeads.apply(q, queries)
    with label("attn.kv"):
        k, v = _ToHeads.apply(k, keys), _ToHeads.apply(v, keys)
    with label("attn.out"):
        out: Tensor = _ToTokens.apply(_Attend.apply(q, k, v, mask.sinks, local), queries)
    return out


@dataclass(frozen=True, eq=False)
class Shares:
    """Which heads each rank takes; with fewer heads than ranks several take the same."""

    heads_by_rank: tuple[tuple[int, ...], ...]
    num_heads: int
    group: dist.ProcessGroup | None

    @property
    def counts(self) -> list[int]:
        """Heads of each rank."""
        return [len(heads) for heads in self.heads_by_rank]

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange ``[B, S, heads, D]`` for this rank's heads of all tokens, ``[B, T, n, D]``."""
        batch, tokens, _, head_dim = tensor.shape
        if len(self.heads_by_rank) == 1:
            return tensor
        with label("exchange.send"):
            shards = ByRank.empty(tensor, self.counts, batch, tokens, head_dim)
        spans = [slice(heads[0], heads[-1] + 1) if heads else slice(0, 0) for heads in self.heads_by_rank]
        shards.write(tensor, slice(0, tokens), spans, [0] * len(spans))
        return seq_to_head(shards, self.group)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Exchange back: all heads of this rank's tokens; copies of a head are summed in fp32."""
        if len(self.heads_by_rank) == 1:
            return heads
        shards = head_to_seq(heads, self.counts, self.group)
        if sum(self.counts) == self.num_heads:
            return torch.cat(shards.segments(), dim=2)
        return sum_heads(shards.segments(), self.heads_by_rank, self.num_heads).to(heads.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.to_heads(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with label("attn.dqkv"):
            return ctx.shares.to_tokens(grad), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.to_tokens(heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        with label("attn.dout"):
            return ctx.shares.to_heads(dout), None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, local: LocalAttention) -> Tensor:
        out, lse = local.with_sinks(sinks).forward(0, q, {0: (k, v)})
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.local = local
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        local = ctx.local.with_sinks(sinks)
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = torch.zeros_like(sinks)
            local.sink_gradient(0, dout, out, lse, dsinks)
        with label("attn.dqkv"):
            dq, found = local.backward(0, dout, q, {0: (k, v)}, out, lse)
            if len(found) == 1:
                _, dk, dv = found[0]
            elif found:
                dk, dv = (torch.cat([parts[i] for parts in found], dim=2) for i in (1, 2))
            else:  # this rank has no heads
                dk, dv = torch.empty_like(k), torch.empty_like(v)
        return dq, dk, dv, dsinks, None
