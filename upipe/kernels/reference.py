"""The dense reference as a kernel: any mask, any device, fp64; every score in memory, so small sizes only."""

from __future__ import annotations

import torch
from torch import Tensor

from upipe import reference
from upipe.kernels.kernel import Kernel, Request, fake_backward, fake_forward


@torch.library.custom_op("upipe::reference_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v)]
    out, lse = reference.attention(
        *wide, causal=causal, window=window, cu_seqlens=cu_seqlens, softcap=softcap, scale=scale
    )
    return out.to(q.dtype).contiguous(), lse.contiguous()


@torch.library.custom_op("upipe::reference_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    qw, kw, vw = (t.to(wide_dtype) for t in (q, k, v))
    kr, vr = (t.repeat_interleave(group, dim=2) for t in (kw, vw))
    logits = torch.einsum("bqhd,bkhd->bhqk", qw, kr) * scale
    slope = torch.ones_like(logits)
    if softcap is not None:
        slope = 1 - torch.tanh(logits / softcap).square()
        logits = softcap * torch.tanh(logits / softcap)
    seen = reference.visible(q.shape[1], causal=causal, window=window, cu_seqlens=cu_seqlens, device=q.device)
    # From the given lse, not a softmax of its own: with sinks the probabilities do not sum to one.
    probabilities = torch.exp(logits - lse[..., None]).masked_fill(~seen, 0)
    do = dout.to(wide_dtype)
    rowsum = (do * out.to(wide_dtype)).sum(-1).transpose(1, 2)[..., None]  # [B, H, T, 1]
    ds = probabilities * (torch.einsum("bqhd,bkhd->bhqk", do, vr) - rowsum) * slope * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, kr)
    dk = torch.einsum("bhqk,bqhd->bkhd", ds, qw).unflatten(2, (-1, group)).sum(3)
    dv = torch.einsum("bhqk,bqhd->bkhd", probabilities, do).unflatten(2, (-1, group)).sum(3)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


_forward.register_fake(fake_forward)
_backward.register_fake(fake_backward)


def _scores_bytes(q: Tensor, copies: int) -> int:
    batch, tokens, heads, _ = q.shape
    return copies * batch * heads * tokens * tokens * torch.promote_types(q.dtype, torch.float32).itemsize


def _refuses(request: Request) -> str | None:
    return None if request.dtype.is_floating_point else f"{request.dtype} is not a floating dtype"


KERNEL = Kernel(
    name="reference",
    forward_op=_forward,
    backward_op=_backward,
    refuses=_refuses,
    forward_workspace=lambda q, *rest: _scores_bytes(q, copies=3),
    backward_workspace=lambda dout, q, *rest: _scores_bytes(q, copies=5),
)
