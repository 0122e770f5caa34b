"""The flash-attn package, versions 3 (``flash_attn_interface``) and 2 (``flash_attn``), imported on use.

Covers causal, window, documents and softcap. Version 3 is taken where it can be imported. Under fake tensors nothing
is imported: the ops then stand for version 3, whose workspace they declare.

References: the forward and backward functions of flash_attn/flash_attn_interface.py (2.7 and later) and
hopper/flash_attn_interface.py. Letters: B batch, T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from upipe.kernels.kernel import Kernel, Request, fake_backward, fake_forward


def installed_version() -> int | None:
    """Return 3 or 2, or None where flash-attn cannot be imported. Imports nothing."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return 3
    spec = importlib.util.find_spec("flash_attn")
    # Version 4 ships a namespace package of this name, without the functions of version 2.
    return 2 if spec is not None and spec.origin is not None else None


def _interface() -> tuple[int, ModuleType]:
    version = installed_version()
    name = "flash_attn_interface" if version == 3 else "flash_attn.flash_attn_interface"
    return version or 2, importlib.import_module(name)


def _keywords(version: int, causal: bool, window: int | None, softcap: float | None, scale: float) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "softmax_scale": scale,
        "window_size_left": -1 if window is None else window - 1,  # ours counts the query's own token
        "window_size_right": 0 if causal and window is not None else -1,
        "softcap": 0.0 if softcap is None else softcap,
    }
    return shared if version == 3 else shared | {"dropout_p": 0.0, "causal": causal, "alibi_slopes": None}


def _borders(cu_seqlens: Tensor) -> dict[str, Any]:
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


@torch.library.custom_op("upipe::flash_forward", mutates_args=())
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
    version, interface = _interface()
    keywords = _keywords(version, causal, window, softcap, scale)
    if version == 3:
        keywords |= {"causal": causal}
    else:
        keywords |= {"return_softmax": False}
    if cu_seqlens is None:
        out, lse = interface._flash_attn_forward(q, k, v, **keywords)[:2]
        return out, lse
    packed = (t.squeeze(0) for t in (q, k, v))  # documents need B = 1
    if version == 3:
        out, lse = interface._flash_attn_forward(*packed, **keywords, **_borders(cu_seqlens))[:2]
    else:
        out, lse = interface._flash_attn_varlen_forward(*packed, **keywords, **_borders(cu_seqlens))[:2]
    return out[None], lse[None]


@torch.library.custom_op("upipe::flash_backward", mutates_args=())
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
    version, interface = _interface()
    keywords = _keywords(version, causal, window, softcap, scale) | {"deterministic": False}
    if version == 3:
        keywords |= {"is_causal": causal}
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    tensors = [dout, q, k, v, out, lse]
    grads = [dq, dk, dv]
    backward = interface._flash_attn_backward
    if cu_seqlens is not None:
        tensors = [t.squeeze(0) for t in tensors]
        grads = [t.squeeze(0) for t in grads]
        keywords |= _borders(cu_seqlens)
        if version == 2:
            backward = interface._flash_attn_varlen_backward
    # Both versions write into the three buffers; only version 2 takes them before the borders, so all go by name.
    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
    backward(**dict(zip(names, (*tensors, *grads), strict=True)), **keywords)
    return dq, dk, dv


_forward.register_fake(fake_forward)
_backward.register_fake(fake_backward)


def backward_workspace(dout: Tensor, q: Tensor, k: Tensor, *rest: object) -> int:
    """FlashAttention-3: dq in fp32, two fp32 a row, and with grouped queries dk and dv in fp32 (version 2: less)."""
    workspace = 4 * q.numel() + 2 * 4 * q.numel() // q.shape[3]
    if q.shape[2] != k.shape[2]:
        workspace += 2 * 4 * k.numel()
    return workspace


def _refuses(request: Request) -> str | None:
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"head_dim must be a multiple of 8 up to 256, not {request.head_dim}"
    if request.fake:
        return None
    if request.device.type != "cuda":
        return f"it runs on cuda, not {request.device.type}"
    if installed_version() is None:
        return "flash-attn is not installed; pip install 'upipe[flash]'"
    return None


KERNEL = Kernel(
    name="flash",
    forward_op=_forward,
    backward_op=_backward,
    refuses=_refuses,
    forward_workspace=lambda *arguments: 0,
    backward_workspace=backward_workspace,
)
