"""What a local exact attention kernel is: two opaque ops, what it refuses, and the workspace it declares.

Letters: B batch, T tokens, H query heads, K KV heads (of one call), D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from upipe.mask import AttentionMask

# (causal, window, cu_seqlens, softcap, scale): how a mask crosses the border of a custom op.
Flat = tuple[bool, int | None, Tensor | None, float | None, float]


@dataclass(frozen=True)
class Request:
    """What a kernel is asked to do; `fake` tensors stand for those of another machine."""

    mask: AttentionMask
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    fake: bool


@dataclass(frozen=True)
class Kernel:
    """A local attention kernel.

    The ops are custom ops (opaque to tracing, compile and selective checkpointing) with these signatures, layouts
    ``[B, T, heads, D]``, grouped queries allowed, log-sum-exp ``[B, H, T]`` in fp32 (fp64 for fp64 inputs)::

        forward_op(q, k, v, causal, window, cu_seqlens, softcap, scale) -> out, lse
        backward_op(dout, q, k, v, out, lse, causal, window, cu_seqlens, softcap, scale) -> dq, dk, dv

    Attention sinks are not a kernel's business. A sink scales a row of the output by ``exp(lse - lse')``, where `lse'`
    includes the sink, and a backward that is given `out'` and `lse'` returns the right dq, dk and dv as it is.

    Args:
        name: as users write it.
        forward_op: see above.
        backward_op: see above.
        refuses: why the kernel cannot do a request, or None.
        forward_workspace: bytes the forward op allocates inside, from its own arguments.
        backward_workspace: the same for backward.
    """

    name: str
    forward_op: CustomOpDef
    backward_op: CustomOpDef
    refuses: Callable[[Request], str | None]
    forward_workspace: Callable[..., int]
    backward_workspace: Callable[..., int]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: ``[B, T, H, D]``.
            k: ``[B, T, K, D]``.
            v: ``[B, T, K, D]``.
            mask: its sinks, if any, cut to these H heads.
            scale: of the logits.

        Returns:
            Output ``[B, T, H, D]`` and log-sum-exp ``[B, H, T]``, the sinks included in both.
        """
        out, lse = self.forward_op(q, k, v, *flatten(mask, scale))
        if mask.sinks is None:
            return out, lse
        with_sink = torch.logaddexp(lse, mask.sinks.to(lse.dtype)[None, :, None])
        out.mul_(torch.exp(lse - with_sink).transpose(1, 2)[..., None])
        return out, with_sink

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: AttentionMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq ``[B, T, H, D]``, dk and dv ``[B, T, K, D]`` from what :meth:`forward` took and returned."""
        return self.backward_op(dout, q, k, v, out, lse, *flatten(mask, scale))


def flatten(mask: AttentionMask, scale: float) -> Flat:
    """Return a mask and a scale as the arguments of a custom op."""
    return mask.causal, mask.window, mask.cu_seqlens, mask.softcap, scale


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and log-sum-exp: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *mask_and_scale: object) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of a forward op."""
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=accumulate_dtype(q.dtype))


def fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of a backward op."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def sink_gradient(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, *, tile_tokens: int = 4096) -> Tensor:
    """Return the gradient ``[H]`` of attention sinks.

    A sink is a logit whose value is zero, so its gradient is minus the sum over the tokens of its probability
    ``exp(sink - lse)`` times ``rowsum(dout * out)``.

    Args:
        sinks: ``[H]``.
        dout: ``[B, T, H, D]``.
        out: ``[B, T, H, D]``, sinks included.
        lse: ``[B, H, T]``, sinks included.
        tile_tokens: tokens whose products are held at a time.
    """
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    for start in range(0, dout.shape[1], tile_tokens):
        tokens = slice(start, start + tile_tokens)
        rowsum = (dout[:, tokens].to(lse.dtype) * out[:, tokens]).sum(-1)  # [B, t, H]
        probability = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse[:, :, tokens])  # [B, H, t]
        total -= torch.einsum("bht,bth->h", probability, rowsum)
    return total.to(sinks.dtype)
