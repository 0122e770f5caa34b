"""One description of what a query may see, understood by every kernel.

Letters: B batch, T tokens of the whole sequence, H query heads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """What a query sees, and what is done to the logits it sees.

    Positions are those of the whole sequence, so a mask means the same on every rank and for every degree.

    Args:
        causal: a token sees itself and those before it.
        window: a token sees the `window` latest tokens, its own included (Hugging Face's ``sliding_window``).
        cu_seqlens: int32 ``[documents + 1]``, document borders in tokens of the whole sequence, from 0 to T; a token
            sees its own document only. B = 1.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``[H]``, one extra logit a query head that takes part in the softmax and carries no value.

    Raises:
        ValueError: window or softcap not positive, a window without causal, cu_seqlens not int32 borders from 0 up,
            sinks not ``[H]`` of a floating dtype.

    >>> AttentionMask(window=0)
    Traceback (most recent call last):
    ValueError: window=0 must be at least 1 token (the query's own); use window=None for no window
    """

    causal: bool = True
    window: int | None = None
    cu_seqlens: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            if isinstance(self.window, bool) or not isinstance(self.window, int):
                raise ValueError(f"window={self.window!r} must be an integer number of tokens")
            if self.window < 1:
                raise ValueError(
                    f"window={self.window} must be at least 1 token (the query's own); use window=None for no window"
                )
            if not self.causal:
                raise ValueError(f"window={self.window} counts tokens backwards and needs causal=True")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be above 0; use softcap=None for no cap")
        if self.sinks is not None and (self.sinks.dim() != 1 or not self.sinks.is_floating_point()):
            raise ValueError(
                f"sinks must be a floating tensor [num_heads]; got {self.sinks.dtype} {list(self.sinks.shape)}"
            )
        if self.cu_seqlens is not None:
            self._check_borders(self.cu_seqlens)

    @staticmethod
    def _check_borders(borders: Tensor) -> None:
        if borders.dtype != torch.int32 or borders.dim() != 1 or borders.numel() < 2:
            raise ValueError(
                "cu_seqlens must be int32 [documents + 1], from 0 to the number of tokens; "
                f"got {borders.dtype} {list(borders.shape)}"
            )
        if isinstance(borders, FakeTensor) or borders.is_meta:
            return
        if int(borders[0]) != 0 or bool((borders.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must start at 0 and never fall; got {borders.tolist()[:8]} ...")

    def check(self, *, batch: int, tokens: int, num_heads: int) -> None:
        """Hold the mask against the sequence it is used on.

        Raises:
            ValueError: cu_seqlens with B > 1 or not ending at T, or sinks of another number of heads.
        """
        if self.sinks is not None and self.sinks.shape[0] != num_heads:
            raise ValueError(f"sinks has {self.sinks.shape[0]} logits for {num_heads} query heads; give one a head")
        if self.cu_seqlens is None:
            return
        if batch != 1:
            raise ValueError(f"cu_seqlens needs batch size 1, got {batch}; pack the rows into one sequence")
        if isinstance(self.cu_seqlens, FakeTensor) or self.cu_seqlens.is_meta:
            return
        if int(self.cu_seqlens[-1]) != tokens:
            raise ValueError(
                f"cu_seqlens ends at {int(self.cu_seqlens[-1])} but the whole sequence has {tokens} tokens; borders "
                "count tokens over all ranks, padding included"
            )

    def with_sinks(self, sinks: Tensor | None) -> AttentionMask:
        """Return the mask with other sinks: those of some heads, or none. Nothing is checked again."""
        mask = copy.copy(self)
        object.__setattr__(mask, "sinks", sinks)
        return mask
