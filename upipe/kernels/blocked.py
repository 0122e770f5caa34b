"""Attention in blocks of queries: any mask, any device, any floating dtype, memory linear in T.

A block of queries meets only the keys that its first and last row can see, so windows and documents cost what they
show. Sums, softmax and the gradients of K and V are held in fp32 (fp64 for fp64) and rounded once.

Letters: B batch, T tokens, H query heads, K KV heads, G = H/K, D head size, N queries of a block, M keys they see.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from upipe.kernels.kernel import Kernel, Request, accumulate_dtype, fake_backward, fake_forward

SCORE_BYTES = 32 * 2**20  # scores of one block; the block shrinks with B, H and T to stay below


def _block_size(q: Tensor) -> int:
    batch, tokens, heads, _ = q.shape
    row_bytes = batch * heads * tokens * accumulate_dtype(q.dtype).itemsize
    return max(1, min(tokens, SCORE_BYTES // max(row_bytes, 1)))


def _blocks(q: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block and the keys that any of them sees."""
    tokens, size = q.shape[1], _block_size(q)
    borders = [0, tokens] if cu_seqlens is None else sorted(set(cu_seqlens.tolist()))
    for document, start_of_next in pairwise(borders):
        for start in range(document, start_of_next, size):
            stop = min(start + size, start_of_next)
            first = document if window is None else max(document, start - window + 1)
            yield slice(start, stop), slice(first, stop if causal else start_of_next)


def _logits(
    q: Tensor, k: Tensor, queries: slice, keys: slice, causal: bool, window: int | None, softcap: float | None
) -> Tensor:
    """Logits ``[B, K, G, N, M]`` of a block from scaled q ``[B, N, K, G, D]`` and k ``[B, M, K, D]``."""
    logits = torch.einsum("bnkgd,bmkd->bkgnm", q, k)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        distance = (
            torch.arange(queries.start, queries.stop, device=q.device)[:, None]
            - torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        )
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        logits.masked_fill_(hidden, -torch.inf)
    return logits


@torch.library.custom_op("upipe::blocked_forward", mutates_args=())
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
    out, lse = fake_forward(q, k, v)
    wide, num_kv = lse.dtype, k.shape[2]
    for queries, keys in _blocks(q, causal, window, cu_seqlens):
        qb = q[:, queries].to(wide).unflatten(2, (num_kv, -1)) * scale  # [B, N, K, G, D]
        logits = _logits(qb, k[:, keys].to(wide), queries, keys, causal, window, softcap)
        block_lse = logits.logsumexp(-1)  # [B, K, G, N]
        probabilities = logits.sub_(block_lse[..., None]).exp_()
        out[:, queries] = torch.einsum("bkgnm,bmkd->bnkgd", probabilities, v[:, keys].to(wide)).flatten(2, 3)
        lse[:, :, queries] = block_lse.flatten(1, 2)
    return out, lse


@torch.library.custom_op("upipe::blocked_backward", mutates_args=())
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
    wide, num_kv = lse.dtype, k.shape[2]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
    for queries, keys in _blocks(q, causal, window, cu_seqlens):
        qb = q[:, queries].to(wide).unflatten(2, (num_kv, -1)) * scale
        kb, vb = k[:, keys].to(wide), v[:, keys].to(wide)
        do = dout[:, queries].to(wide)
        rowsum = (do * out[:, queries]).sum(-1).transpose(1, 2).unflatten(1, (num_kv, -1))[..., None]
        do = do.unflatten(2, (num_kv, -1))
        logits = _logits(qb, kb, queries, keys, causal, window, softcap)
        probabilities = torch.exp(logits - lse[:, :, queries].unflatten(1, (num_kv, -1))[..., None])
        dv[:, keys] += torch.einsum("bkgnm,bnkgd->bmkd", probabilities, do)
        ds = probabilities.mul_(torch.einsum("bnkgd,bmkd->bkgnm", do, vb).sub_(rowsum))
        if softcap is not None:  # hidden logits are -inf where ds is 0
            ds.mul_(1 - (logits.clamp_(min=-softcap) / softcap).square_())
        dk[:, keys] += torch.einsum("bkgnm,bnkgd->bmkd", ds, qb)
        dq[:, queries] = (torch.einsum("bkgnm,bmkd->bnkgd", ds, kb) * scale).flatten(2, 3)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


_forward.register_fake(fake_forward)
_backward.register_fake(fake_backward)


def _block_bytes(q: Tensor, k: Tensor, copies: int) -> int:
    """Bytes of `copies` score blocks, and of K and V in the accumulation dtype."""
    batch, tokens, heads, _ = q.shape
    return accumulate_dtype(q.dtype).itemsize * (copies * batch * heads * _block_size(q) * tokens + 2 * k.numel())


def _backward_workspace(dout: Tensor, q: Tensor, k: Tensor, *rest: object) -> int:
    accumulators = 2 * k.numel() * accumulate_dtype(q.dtype).itemsize
    return _block_bytes(q, k, copies=4) + accumulators


def _refuses(request: Request) -> str | None:
    return None if request.dtype.is_floating_point else f"{request.dtype} is not a floating dtype"


KERNEL = Kernel(
    name="blocked",
    forward_op=_forward,
    backward_op=_backward,
    refuses=_refuses,
    forward_workspace=lambda q, k, *rest: _block_bytes(q, k, copies=2),
    backward_workspace=_backward_workspace,
)
