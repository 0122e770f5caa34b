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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe.collectives import ByRank, group_rank, group_size
from upipe.kernels import select_kernel
from upipe.local_attention import LocalAttention
from upipe.mask import AttentionMask
from upipe.memory.label import label
from upipe.projections import Projections
from upipe.rank_pass import Gradients, Layer, RankPass
from upipe.rotary import Rotary
from upipe.schedule import HeadSchedule
from upipe.stages import backward_stages, forward_stages


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
        positions: integers ``[S]`` or ``[B, S]``, positions of this rank's tokens in the whole sequence (from 0 again
            in each document); None counts on from the ranks before. Used by `rotary` only.
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
    if autocast_enabled(x):
        x, proj = _cast(x, proj, torch.get_autocast_dtype(x.device.type))
    layer = resolve(
        x,
        proj,
        group=group,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_stage=heads_per_stage,
        positions=positions,
        rotary=rotary,
        mask=mask,
        scale=scale,
        kernel=kernel,
        keep_attention=keep_attention,
    )
    y: Tensor = _Headwise.apply(layer, x, mask.sinks, *proj.tensors())
    return y


def resolve(
    x: Tensor,
    proj: Projections,
    *,
    group: dist.ProcessGroup | None,
    num_heads: int,
    num_kv_heads: int,
    heads_per_stage: int | None,
    positions: Tensor | None,
    rotary: Rotary | None,
    mask: AttentionMask,
    scale: float | None,
    kernel: str,
    keep_attention: bool,
) -> Layer:
    """Check the arguments of :func:`headwise_attention` and return what is not differentiated. Raises as it does."""
    if x.dim() != 3 or not x.numel():
        raise ValueError(f"x must be [B, S, d] with at least one token, got {list(x.shape)}")
    head_dim = proj.check(x, num_heads=num_heads, num_kv_heads=num_kv_heads)
    ranks, rank = group_size(group), group_rank(group)
    mask.check(batch=x.shape[0], tokens=ranks * x.shape[1], num_heads=num_heads)
    return Layer(
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


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast applies to the device of `x`; meta tensors know no autocast."""
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()


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


class _Headwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, sinks: Tensor | None, *weights: Tensor | None) -> Tensor:
        layer = replace(layer, local=layer.local.with_sinks(sinks))
        with without_autocast(x):
            rank = RankPass(layer, x, Projections.of(weights, layer.eps))
            attended = forward_stages(rank)
            y = rank.output([shards for shards, _ in attended])
        saved = [tensor for shards, lse in attended for tensor in (shards.buffer, lse)] if layer.keep_attention else []
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
        with without_autocast(x):
            rank = RankPass(layer, x, Projections.of(weights, layer.eps))
            grads = Gradients(rank, needs, sinks)
            kept = None
            if layer.keep_attention:
                pairs = zip(saved[::2], saved[1::2], strict=True)
                kept = [(rank.by_rank(out, rank.query_counts(i)), lse) for i, (out, lse) in enumerate(pairs)]

            def output_gradient(index: int, out_shards: ByRank) -> ByRank:
                grads.output_weights(index, dy, out_shards)
                return grads.output_gradient(index, dy)

            dq_shards, dkv_shards = backward_stages(rank, kept, output_gradient, grads.sinks)
            with label("attn.dx"):
                dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs["x"] else None
            grads.through_input(dq_shards, dkv_shards, None if dx is None else dx_writer(dx))
        return None, dx, grads.sinks, *(grads.weights.get(name) for name in names)


def dx_writer(dx: Tensor) -> Callable[[slice, Tensor], None]:
    """Return a function that writes a tile of dx ``[B, S, d]``."""

    def write(tokens: slice, rows: Tensor) -> None:
        dx[:, tokens] = rows

    return write
