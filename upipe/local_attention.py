"""Attention of one stage on one rank: kernel calls over the query heads of the stage and the KV heads that are here.

Letters: B batch, T tokens of the whole sequence, D head size, H query heads of the stage on this rank, n KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upipe.kernels import Kernel, accumulate_dtype, sink_gradient
from upipe.mask import AttentionMask
from upipe.schedule import HeadSchedule

# K and V, each ``[B, T, n, D]``, that arrived together, by the stage of their arrival.
HeldKV = dict[int, tuple[Tensor, Tensor]]
# KV heads, and their dK and dV ``[B, T, n, D]``.
KVGradient = tuple[Sequence[int], Tensor, Tensor]


@dataclass(frozen=True)
class LocalAttention:
    """What a rank needs to know to attend; the arguments of the schemes, resolved once."""

    schedule: HeadSchedule
    rank: int
    kernel: Kernel
    mask: AttentionMask
    scale: float

    def with_sinks(self, sinks: Tensor | None) -> LocalAttention:
        """Return the same with the sinks of all H heads, as they came back from autograd."""
        return replace(self, mask=self.mask.with_sinks(sinks))

    def forward(self, index: int, q: Tensor, held: HeldKV) -> tuple[Tensor, Tensor]:
        """Attend with the query heads ``[B, T, H, D]`` of stage `index`; return output and lse ``[B, H, T]``."""
        calls = self.schedule.kernel_calls(index, self.rank)
        if len(calls) == 1:
            k, v = self._kv(held, calls[0].arrival, calls[0].kv_heads)
            return self.kernel.forward(q, k, v, self._mask(index, calls[0].q_heads), self.scale)
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate_dtype(q.dtype))
        for call in calls:
            k, v = self._kv(held, call.arrival, call.kv_heads)
            out[:, :, call.q_heads], lse[:, call.q_heads] = self.kernel.forward(
                q[:, :, call.q_heads], k, v, self._mask(index, call.q_heads), self.scale
            )
        return out, lse

    def backward(
        self, index: int, dout: Tensor, q: Tensor, held: HeldKV, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, list[KVGradient]]:
        """Return dq ``[B, T, H, D]`` of stage `index`, and dK and dV of its KV heads in order."""
        calls = self.schedule.kernel_calls(index, self.rank)
        found: list[KVGradient] = []
        dq = q.new_empty(q.shape) if len(calls) != 1 else None
        for call in calls:
            heads = call.q_heads
            k, v = self._kv(held, call.arrival, call.kv_heads)
            part, dk, dv = self.kernel.backward(
                dout[:, :, heads],
                q[:, :, heads],
                k,
                v,
                out[:, :, heads],
                lse[:, heads].contiguous(),
                self._mask(index, heads),
                self.scale,
            )
            found.append((self.schedule.stages[call.arrival].new_kv_heads[self.rank][call.kv_heads], dk, dv))
            if dq is None:
                return part, found
            dq[:, :, heads] = part
        assert dq is not None
        return dq, found

    def sink_gradient(self, index: int, dout: Tensor, out: Tensor, lse: Tensor, dsinks: Tensor) -> None:
        """Write the gradient of the sinks of this rank's heads of stage `index` into `dsinks`, one entry a head."""
        heads = self.schedule.stages[index].q_heads[self.rank]
        if heads:
            assert self.mask.sinks is not None
            run = slice(heads[0], heads[-1] + 1)
            dsinks[run] = sink_gradient(self.mask.sinks[run], dout, out, lse)

    def still_needed(self, index: int, held: HeldKV) -> HeldKV:
        """Return the K and V of `held` that the stage after `index` reads; no later stage reads the others."""
        if index + 1 == len(self.schedule.stages):
            return {}
        needed = {call.arrival for call in self.schedule.kernel_calls(index + 1, self.rank)}
        return {arrival: kv for arrival, kv in held.items() if arrival in needed}

    def _kv(self, held: HeldKV, arrival: int, heads: slice) -> tuple[Tensor, Tensor]:
        k, v = held[arrival]
        return k[:, :, heads], v[:, :, heads]

    def _mask(self, index: int, heads: slice) -> AttentionMask:
        """Return the mask with its sinks cut to the heads of one call."""
        if self.mask.sinks is None:
            return self.mask
        first = self.schedule.stages[index].q_heads[self.rank][heads.start]
        return self.mask.with_sinks(self.mask.sinks[first : first + heads.stop - heads.start])


class KVGradients:
    """dK and dV of the KV heads of one rank while its stages go by.

    A head used in several stages is summed in fp32 (fp64 for fp64) and rounded once, when it is taken out; a head used
    in one stage keeps what the kernel returned.
    """

    def __init__(self, schedule: HeadSchedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, index: int, gradient: KVGradient) -> None:
        """Add what stage `index` found for some heads."""
        heads, dk, dv = gradient
        stage = self._schedule.stages[index]
        done = self._schedule.done_kv_heads(index)[self._rank]
        for i, head in enumerate(heads):
            parts = dk[:, :, i], dv[:, :, i]
            if head in self._sums:
                for total, part in zip(self._sums[head], parts, strict=True):
                    total.add_(part)
            elif head in stage.new_kv_heads[self._rank] and head in done:
                self._sums[head] = parts
            else:
                wide = accumulate_dtype(dk.dtype)
                first, second = (torch.empty(part.shape, dtype=wide, device=part.device).copy_(part) for part in parts)
                self._sums[head] = first, second

    def take(self, heads: Sequence[int], like: Tensor) -> Tensor:
        """Take `heads` out as dK and dV ``[B, T, 2, n, D]`` in the dtype of `like` ``[B, T, heads, D]``."""
        batch, tokens, _, head_dim = like.shape
        packed = like.new_empty(batch, tokens, 2, len(heads), head_dim)
        for i, head in enumerate(heads):
            for which, total in enumerate(self._sums.pop(head)):
                packed[:, :, which, i].copy_(total)
        return packed
