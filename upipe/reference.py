"""The specification: dense attention, a dense attention layer and a loss, in the dtype given (fp64 for truth).

Imports nothing of this package, holds every score in memory, and is differentiated by plain autograd.

Letters: B batch, T tokens of the whole sequence, H query heads, K KV heads, D head size, d hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def visible(
    tokens: int, *, causal: bool, window: int | None, cu_seqlens: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a boolean ``[T, T]``: whether a query (row) sees a key (column)."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position[None, :]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    if cu_seqlens is not None:
        document = torch.bucketize(position, cu_seqlens.to(device), right=True)
        seen &= document[:, None] == document[None, :]
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with every score in memory.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, T, K, D]``; query head h reads KV head ``h // (H/K)``.
        v: ``[B, T, K, D]``.
        causal: a token sees itself and those before it.
        window: the number of latest tokens seen, the query's own included.
        cu_seqlens: int32 ``[documents + 1]``.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[H]``, an extra logit a head without a value.
        scale: of the logits; None is ``1 / sqrt(D)``.

    Returns:
        Output ``[B, T, H, D]`` and log-sum-exp of the logits, the sink's included, ``[B, H, T]``.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = visible(q.shape[1], causal=causal, window=window, cu_seqlens=cu_seqlens, device=q.device)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    probabilities = torch.exp(logits - lse[..., None])[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dim; the identity without a weight."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary(x: Tensor, positions: Tensor, theta: float, rotary_dim: int | None = None) -> Tensor:
    """Rotate half-split pairs of the first `rotary_dim` entries of each head ``[B, T, heads, D]``."""
    size = x.shape[-1] if rotary_dim is None else rotary_dim
    exponent = torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size
    angle = positions.double()[..., None] * theta**-exponent
    angle = angle.view(-1, x.shape[1], 1, size // 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention_layer(
    x: Tensor,
    weights: dict[str, Tensor],
    *,
    num_heads: int,
    num_kv_heads: int,
    theta: float | None = None,
    rotary_dim: int | None = None,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """A whole attention layer on one device: project, norm, rotate, attend, project.

    Args:
        x: ``[B, T, d]``.
        weights: q, k, v, o in ``nn.Linear`` layout, and any of q_bias, k_bias, v_bias, o_bias, q_norm, k_norm.
        num_heads: H.
        num_kv_heads: K.
        theta: rotary base; None for no rotary.
        rotary_dim: how many entries of a head are rotated; None for all.
        positions: ``[T]`` or ``[B, T]``; None counts from 0.
        eps: of the q and k norms.
        scale: as the mask arguments, of :func:`attention`.
        causal: see :func:`attention`.
        window: see :func:`attention`.
        cu_seqlens: see :func:`attention`.
        softcap: see :func:`attention`.
        sinks: see :func:`attention`.

    Returns:
        ``[B, T, d]``.
    """
    batch, tokens, _ = x.shape
    q, k, v = (
        F.linear(x, weights[name], weights.get(f"{name}_bias")).view(batch, tokens, heads, -1)
        for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads))
    )
    q, k = rms_norm(q, weights.get("q_norm"), eps), rms_norm(k, weights.get("k_norm"), eps)
    if theta is not None:
        where = torch.arange(tokens, device=x.device) if positions is None else positions
        q, k = rotary(q, where, theta, rotary_dim), rotary(k, where, theta, rotary_dim)
    out, _ = attention(
        q, k, v, causal=causal, window=window, cu_seqlens=cu_seqlens, softcap=softcap, sinks=sinks, scale=scale
    )
    return F.linear(out.reshape(batch, tokens, -1), weights["o"], weights.get("o_bias"))


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU: ``down(silu(gate x) * up x)``; weights in ``nn.Linear`` layout."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def next_token_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean negative log-likelihood of valid tokens; ``labels[t]`` is the token at t, and logits at t predict t + 1."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=ignore_index)
