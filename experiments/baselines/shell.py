"""What both published blocks share around attention: recompute, input on the host, residual adds, exchanges.

Letters: B batch, S tokens of this rank, T = C*S, C ranks, n heads of a rank, H query heads, K KV heads, D head size,
d hidden size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from experiments.baselines.tiled import tiled
from experiments.config import ModelConfig
from upipe import Rotary
from upipe.collectives import ByRank, group_size, head_to_seq, seq_to_head
from upipe.kernels import accumulate_dtype
from upipe.memory.label import label


def check_geometry(method: str, model: ModelConfig, group: dist.ProcessGroup | None) -> None:
    """Refuse what the published code does not run.

    Raises:
        ValueError: KV heads that do not divide over the ranks, or norms of q and k.
    """
    ranks = group_size(group)
    if model.kv_heads % ranks:
        valid = [degree for degree in range(1, model.kv_heads + 1) if model.kv_heads % degree == 0]
        raise ValueError(
            f"method={method} exchanges whole KV heads: kv_heads={model.kv_heads} must be a multiple of {ranks} ranks; "
            f"valid ranks: {', '.join(map(str, valid))}. Any other number runs with method=upipe"
        )
    if model.qk_norm:
        raise ValueError(f"method={method} has no norms of q and k; set model.qk_norm=false or use method=upipe")


def rotary_table(model: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the complex rotations ``[*positions.shape, D/2]`` of a model: complex64, complex128 for fp64.

    Args:
        model: the geometry.
        positions: integers ``[S]`` or ``[B, S]``.
        dtype: of the block.
    """
    rotary = Rotary(model.rope_theta, model.head_size, scaling=model.rope_scaling)
    with label("rotary.table"):
        return torch.complex(*rotary.tables(positions, accumulate_dtype(dtype)))


def run_block(
    block: nn.Module,
    model: ModelConfig,
    x: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor | None,
    *,
    offload_input: bool,
) -> Tensor:
    """Run a block under full recompute: of its forward nothing is kept but x and the rotary table, on the host.

    Args:
        block: with the children of :class:`experiments.model.Block`.
        model: its geometry.
        x: ``[B, S, d]``.
        positions: integers ``[S]`` or ``[B, S]``, or what :func:`rotary_table` made of them: the published decoder
            makes one for all blocks, which stays on the device.
        cu_seqlens: must be None.
        offload_input: False keeps both on the device; the published runs did that in the first block.

    Raises:
        ValueError: documents.
    """
    if cu_seqlens is not None:
        raise ValueError("the published blocks attend over one document; cu_seqlens must be None, or use method=upipe")
    table = positions if positions.is_complex() else rotary_table(model, positions, x.dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device) if offload_input else nullcontext()
    with hooks:  # they see what checkpoint itself saves: the arguments
        y: Tensor = checkpoint(_layers, block, x, table, use_reentrant=False, preserve_rng_state=False)
    return y


def _layers(block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
    skip, into = _Fork.apply(x, "block.dx")
    h = _add(skip, block.self_attn(tiled(block.input_layernorm, into, "attn.norm"), table))
    skip, into = _Fork.apply(h, "block.dh")
    return _add(skip, tiled(block.mlp, tiled(block.post_attention_layernorm, into, "mlp.norm"), "mlp"))


def _add(residual: Tensor, branch: Tensor) -> Tensor:
    with label("block.residual"):
        return residual + branch


class _Fork(torch.autograd.Function):
    """A tensor that is used twice; autograd would add its two gradients too, but under no label."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.name = name
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        with label(ctx.name):
            return first + second, None


@torch.no_grad()
def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device]:
    from upipe.offload import to_host

    with label("offload"):
        return to_host(tensor.detach()), tensor.device


@torch.no_grad()
def _to_device(saved: tuple[Tensor, torch.device]) -> Tensor:
    from upipe.offload import to_device

    with label("rotary.table" if saved[0].is_complex() else "block.input"):
        return to_device(*saved)


def linear(x: Tensor, weight: Tensor, *, out: str, dx: str) -> Tensor:
    """Equals ``F.linear``; the output is labelled `out`, the gradient of x `dx`."""
    y: Tensor = _Linear.apply(x, weight, out, dx)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out: str, dx: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dx = dx
        with label(out):
            return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        with label(ctx.dx):
            dx = dy @ weight
        with label("attn.dweight"):
            return dx, dy.flatten(0, 1).t() @ x.flatten(0, 1), None, None


def to_heads(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange ``[B, S, C*n, D]`` for this rank's heads of all tokens, ``[B, T, n, D]``, synchronously.

    Cost: a permuted copy to send and a contiguous one of what was received, each beside the input; both are released
    on return but the result.
    """
    ranks = group_size(group)
    if ranks == 1:
        return tensor
    batch, tokens, heads, head_dim = tensor.shape
    count = heads // ranks
    with label("exchange"):
        shards = ByRank.empty(tensor, [count] * ranks, batch, tokens, head_dim)
        spans = [slice(rank * count, (rank + 1) * count) for rank in range(ranks)]
        shards.write(tensor, slice(0, tokens), spans, [0] * ranks)
        received = seq_to_head(shards, group)
    return received.clone(memory_format=torch.contiguous_format)


def to_tokens(heads: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange ``[B, T, n, D]`` for all heads of this rank's tokens, ``[B, S, C*n, D]``: the inverse, at its cost."""
    ranks = group_size(group)
    if ranks == 1:
        return heads
    with label("exchange"):
        shards = head_to_seq(heads.clone(memory_format=torch.contiguous_format), [heads.shape[2]] * ranks, group)
    return torch.cat(shards.segments(), dim=2)
