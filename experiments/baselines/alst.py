"""The block of the published ALST runs: plain Ulysses, tiled norms and MLP, block inputs on the host.

Letters: B batch, S tokens of this rank, T = C*S, C ranks, n heads of a rank, D head size. A is B*S*d*2 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from experiments.baselines.shell import check_geometry, linear, run_block, to_heads, to_tokens
from experiments.config import ModelConfig
from experiments.model import SwiGLU
from upipe import AttentionMask
from upipe.kernels import Kernel, accumulate_dtype, select_kernel
from upipe.memory.label import label


class AlstBlock(nn.Module):
    """Equals :class:`experiments.model.Block` and loads its state_dict; tensors live as long as in the published runs.

    At the peak of a Llama3-8B block on 8 ranks, the ring wrapper's backward, stand 14.7 A
    (tests/experiments/test_baselines.py): the input, its norm, dy and the residual's gradient 4; q, k, v and out of all
    heads 2.5 and dout 1; dq, dk, dv as the kernel wrote them 1.5, in fp32 3, and cast back 1.5; fp32 receive buffers
    for dk and dv that nobody fills 1; the rotary table and its copy 0.125; log-sum-exp 0.016. In forward 9.8 A, in
    the rotary: the input and its norm 2; v 0.25; q and k 1.25, in fp32 2.5, turned 2.5, cast back 1.25; the table 0.06.

    Args:
        model: the geometry.
        group: the C ranks; None is this process alone.
        kernel: name of the local kernel.
        offload_input: False keeps the block input on the device, as in the first block.

    Raises:
        ValueError: KV heads no multiple of the ranks, or qk_norm.
    """

    def __init__(
        self, model: ModelConfig, group: dist.ProcessGroup | None, kernel: str, *, offload_input: bool = True
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.self_attn = AlstAttention(model, group, kernel)
        self.post_attention_layernorm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = SwiGLU(model)
        self.model, self.offload_input = model, offload_input

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """See :func:`experiments.baselines.shell.run_block`."""
        return run_block(self, self.model, x, positions, cu_seqlens, offload_input=self.offload_input)


class AlstAttention(nn.Module):
    """All heads at once; KV heads are exchanged once each."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup | None, kernel: str) -> None:
        super().__init__()
        check_geometry("alst", model, group)
        self.head_dim, self.group, self.kernel = model.head_size, group, kernel
        rows, kv_rows = model.heads * model.head_size, model.kv_heads * model.head_size
        self.q_proj = nn.Linear(model.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, model.hidden_size, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (
            linear(x, proj.weight, out=name, dx="attn.dx").unflatten(-1, (-1, self.head_dim))
            for name, proj in (("attn.q", self.q_proj), ("attn.kv", self.k_proj), ("attn.kv", self.v_proj))
        )
        q, k = rotate_as_complex(q, k, table)
        kernel = select_kernel(self.kernel, AttentionMask(), q)
        q = _ToHeads.apply(q, self.group, "attn.q")
        k = _ToHeads.apply(k, self.group, "attn.kv")
        v = _ToHeads.apply(v, self.group, "attn.kv")
        out = _ToTokens.apply(_LoneRing.apply(q, k, v, kernel), self.group)
        return linear(out.flatten(2), self.o_proj.weight, out="attn.y", dx="attn.dout")


def rotate_as_complex(q: Tensor, k: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by complex multiplication: q and k, both in fp32 (fp64 for fp64), and both results are alive together.

    Pairs are (i, i + D/2), as in Hugging Face's checkpoints; the published code pairs neighbours.
    """
    turn = table.unsqueeze(-2)  # [.., S, 1, D/2]
    with label("rotary.fp32"):
        wide_q, wide_k = _ToComplex.apply(q), _ToComplex.apply(k)
        turned_q, turned_k = wide_q * turn, wide_k * turn
    with label("attn.q"):
        q = _FromComplex.apply(turned_q, q.dtype)
    with label("attn.kv"):
        k = _FromComplex.apply(turned_k, k.dtype)
    return q, k


def _to_complex(x: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2)  # [.., D/2, 2]
    return torch.view_as_complex(_dense(pairs, accumulate_dtype(x.dtype)))


def _from_complex(z: Tensor, dtype: torch.dtype) -> Tensor:
    halves = torch.view_as_real(z).transpose(-1, -2)  # [.., 2, D/2]
    return _dense(halves, dtype).flatten(-2)


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One contiguous copy, also where x has the dtype already."""
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


class _ToComplex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return _to_complex(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        with label("attn.dqkv"):
            return _from_complex(dz, ctx.dtype)


class _FromComplex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, dtype: torch.dtype) -> Tensor:
        return _from_complex(z, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        with label("rotary.fp32"):
            return _to_complex(dx), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None, name: str) -> Tensor:
        ctx.group = group
        with label(name):
            return to_heads(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with label("attn.dqkv"):
            return to_tokens(grad, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        with label("attn.out"):
            return to_tokens(heads, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        with label("attn.dout"):
            return to_heads(dout, ctx.group), None


class _LoneRing(torch.autograd.Function):
    """The ring wrapper around the kernel, on a ring of one rank: the copies and buffers of a ring, nothing sent."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        with label("ring.out_lse"):
            block, lse = kernel.forward(q, k, v, AttentionMask(), _scale(q))
        with label("ring.fp32"):
            wide = block.to(accumulate_dtype(q.dtype))
        with label("attn.out"):
            out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with label("ring.block"):
            blocks = ctx.kernel.backward(dout, q, k, v, out, lse, AttentionMask(), _scale(q))
        with label("ring.fp32"):
            wide = [block.to(accumulate_dtype(q.dtype)) for block in blocks]
        with label("ring.receive"):
            received = [torch.empty_like(sum_) for sum_ in wide[1:]]
        with label("attn.dqkv"):
            grads = [sum_.to(q.dtype) for sum_ in wide]
        del received  # alive up to here; with one rank nothing arrives in it
        return *grads, None


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])
