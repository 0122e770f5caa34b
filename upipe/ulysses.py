"""Plain Ulysses attention: all heads exchanged at once. The baseline of this package.

Reference: DeepSpeed-Ulysses, arXiv 2309.14509. Letters: B batch, S tokens of this rank, T = C*S, C ranks, H query
heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe.collectives import ByRank, group_rank, group_size, head_to_seq, seq_to_head, sum_heads
from upipe.kernels import select_kernel
from upipe.local_attention import KVGradients, LocalAttention
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
    ranks = group_size(group)
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    mask.check(batch=q.shape[0], tokens=ranks * q.shape[1], num_heads=num_heads)
    local = LocalAttention(
        schedule=HeadSchedule.build(num_heads, num_kv_heads, ranks, num_heads),
        rank=group_rank(group),
        kernel=select_kernel(kernel, mask, q),
        mask=mask.with_sinks(None),
        scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
    )
    out: Tensor = _Ulysses.apply(q, k, v, mask.sinks, local, group)
    return out


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, local: LocalAttention, group: Any
    ) -> Tensor:
        local = local.with_sinks(sinks)
        stage = local.schedule.stages[0]
        with label("attn.q"):
            q_heads = seq_to_head(_by_rank([q], stage.q_heads), group)
        with label("attn.kv"):
            kv_heads = seq_to_head(_by_rank([k, v], stage.kv_heads), group).unflatten(2, (2, -1))
        with label("attn.out"):
            out, lse = local.forward(0, q_heads, {0: kv_heads})
            shards = head_to_seq(out, [len(heads) for heads in stage.q_heads], group)
            result = _heads(shards, stage.q_heads, q.shape[2])
        ctx.save_for_backward(q_heads, kv_heads, out, lse, sinks)
        ctx.local, ctx.group = local, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse, sinks = ctx.saved_tensors
        local, group = ctx.local, ctx.group
        local = local.with_sinks(sinks)
        schedule, stage = local.schedule, local.schedule.stages[0]
        with label("attn.dout"):
            dout_heads = seq_to_head(_by_rank([dout], stage.q_heads), group)
        grads = KVGradients(schedule, local.rank)
        with label("attn.dqkv"):
            dq_heads = local.backward(0, dout_heads, q, {0: kv}, out, lse, grads)
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = torch.zeros_like(sinks)
            local.sink_gradient(0, dout_heads, out, lse, dsinks)
        del dout_heads, q, kv, out
        with label("attn.dqkv"):
            dq = _heads(
                head_to_seq(dq_heads, [len(heads) for heads in stage.q_heads], group),
                stage.q_heads,
                schedule.num_heads,
            )
            counts = [2 * len(heads) for heads in stage.kv_heads]
            packed = grads.take(stage.kv_heads[local.rank], dq_heads).flatten(2, 3)
            del dq_heads
            shards = head_to_seq(packed, counts, group)
            del packed
            dk, dv = (_heads(shards, stage.kv_heads, schedule.num_kv_heads, part) for part in ((0, 2), (1, 2)))
        return dq, dk, dv, dsinks, None, None


def _by_rank(tensors: list[Tensor], heads_by_rank: tuple[tuple[int, ...], ...]) -> ByRank:
    """Lay ``[B, S, heads, D]`` tensors out by rank; several tensors follow one another in a rank's segment."""
    batch, tokens, _, head_dim = tensors[0].shape
    if len(heads_by_rank) == 1 and len(tensors) == 1:
        return ByRank(tensors[0].contiguous().view(-1), (len(heads_by_rank[0]),), batch, tokens, head_dim)
    with label("exchange.send"):
        counts = [len(tensors) * len(heads) for heads in heads_by_rank]
        shards = ByRank.empty(tensors[0], counts, batch, tokens, head_dim)
    for i, tensor in enumerate(tensors):
        spans = [slice(heads[0], heads[-1] + 1) if heads else slice(0, 0) for heads in heads_by_rank]
        shards.write(tensor, slice(0, tokens), spans, [i * len(heads) for heads in heads_by_rank])
    return shards


def _heads(
    shards: ByRank, heads_by_rank: tuple[tuple[int, ...], ...], num_heads: int, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Collect ``[B, S, heads, D]`` from what the ranks returned; copies of a KV head are summed in fp32.

    Args:
        shards: what came back.
        heads_by_rank: the heads of each rank.
        num_heads: heads of the result.
        part: (i, n): the i-th of n tensors in each rank's segment.
    """
    index, parts = part
    pieces = [
        segment[:, :, index * len(heads) : (index + 1) * len(heads)]
        for segment, heads in zip(shards.segments(), heads_by_rank, strict=True)
    ]
    if sum(map(len, heads_by_rank)) == num_heads:
        return pieces[0] if len(pieces) == 1 and parts == 1 else torch.cat(pieces, dim=2)
    return sum_heads(pieces, heads_by_rank, num_heads).to(shards.buffer.dtype)
