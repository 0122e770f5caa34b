"""PyTorch's own flash attention, called through aten: causal and full, on CPU (any floating dtype) and on CUDA.

On CUDA the op is FlashAttention-2, which PyTorch can be told to switch to a later one. Heads are transposed to
PyTorch's layout by strides, without a copy.

Letters: B batch, T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upipe.kernels.kernel import Kernel, Request, fake_backward, fake_forward

aten = torch.ops.aten


def _heads_first(t: Tensor) -> Tensor:
    # The CPU kernel reads the entries of a head as neighbours whatever their stride says.
    return (t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2)


@torch.library.custom_op("upipe::sdpa_forward", mutates_args=())
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
    qt, kt, vt = (_heads_first(t) for t in (q, k, v))
    if q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention(qt, kt, vt, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(qt, kt, vt, 0.0, causal, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@torch.library.custom_op("upipe::sdpa_backward", mutates_args=())
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
    dot, qt, kt, vt, ot = (_heads_first(t) for t in (dout, q, k, v, out))
    if q.is_cuda:
        tokens, no_dropout = q.shape[1], torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            dot, qt, kt, vt, ot, lse, None, None, tokens, tokens, 0.0, causal, no_dropout, no_dropout, scale=scale
        )
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dot, qt, kt, vt, ot, lse, 0.0, causal, scale=scale
        )
    dq, dk, dv = (grad.transpose(1, 2).contiguous() for grad in grads)
    return dq, dk, dv


_forward.register_fake(fake_forward)
_backward.register_fake(fake_backward)


def flash2_backward_workspace(dout: Tensor, q: Tensor, k: Tensor, *rest: object) -> int:
    """FlashAttention-2: dq in fp32, one fp32 a row, and with grouped queries dk and dv once a query head."""
    workspace = 4 * q.numel() + 4 * q.numel() // q.shape[3]
    if q.shape[2] != k.shape[2]:
        workspace += 2 * q.numel() * q.dtype.itemsize
    return workspace


def _backward_workspace(dout: Tensor, q: Tensor, k: Tensor, *rest: object) -> int:
    # The CPU kernel holds tiles below 1 MiB a thread, which are not counted.
    return flash2_backward_workspace(dout, q, k) if q.is_cuda else 0


def _refuses(request: Request) -> str | None:
    mask = request.mask
    for name, value in (("window", mask.window), ("cu_seqlens", mask.cu_seqlens), ("softcap", mask.softcap)):
        if value is not None:
            return f"it covers causal and full attention, not {name}"
    if request.device.type == "cpu":
        return None if request.dtype.is_floating_point else f"{request.dtype} is not a floating dtype"
    if request.device.type != "cuda":
        return f"it runs on cpu and cuda, not {request.device.type}"
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"on cuda it needs float16 or bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"on cuda head_dim must be a multiple of 8 up to 256, not {request.head_dim}"
    return None


KERNEL = Kernel(
    name="sdpa",
    forward_op=_forward,
    backward_op=_backward,
    refuses=_refuses,
    forward_workspace=lambda *arguments: 0,
    backward_workspace=_backward_workspace,
)
