"""The weights of an attention layer, and the arithmetic of one token tile on either side of attention.

Letters: B batch, t tokens of a tile, d hidden size, H query heads, K KV heads, n heads of a projection, D head size,
R rotary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from upipe.kernels import accumulate_dtype
from upipe.rotary import rotate, rotate_transposed


@dataclass(frozen=True, eq=False)
class Projections:
    """Weights of an attention layer in ``nn.Linear`` layout. They are read by row or column, never moved or permuted.

    Args:
        q: ``[H*D, d]``.
        k: ``[K*D, d]``.
        v: ``[K*D, d]``.
        o: ``[d, H*D]``.
        q_bias: ``[H*D]`` or None, as the other biases.
        k_bias: ``[K*D]``.
        v_bias: ``[K*D]``.
        o_bias: ``[d]``.
        q_norm: ``[D]``, weight of an RMS norm of every query head before rotary, or None.
        k_norm: ``[D]``, the same for K.
        eps: of the two norms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6

    @classmethod
    def tensor_names(cls) -> tuple[str, ...]:
        """Names of the tensor fields, in order."""
        return tuple(field.name for field in fields(cls) if field.name != "eps")

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], eps: float) -> Projections:
        """Build from the tensor fields, in order."""
        return cls(*tensors, eps=eps)  # type: ignore[arg-type,misc]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensor fields, in order."""
        return tuple(getattr(self, name) for name in self.tensor_names())

    def check(self, x: Tensor, *, num_heads: int, num_kv_heads: int) -> int:
        """Hold the weights against an input ``[B, S, d]`` and return D.

        Raises:
            ValueError: a shape, dtype or device that does not fit; the tensor is named.
        """
        rows, hidden = self.q.shape[0], x.shape[-1]
        if rows % num_heads:
            raise ValueError(
                f"q weight has {rows} rows, not a multiple of num_heads={num_heads}; it must be [num_heads*head_dim, d]"
            )
        head_dim = rows // num_heads
        kv_rows = num_kv_heads * head_dim
        shapes = {
            "q": (rows, hidden),
            "k": (kv_rows, hidden),
            "v": (kv_rows, hidden),
            "o": (hidden, rows),
            "q_bias": (rows,),
            "k_bias": (kv_rows,),
            "v_bias": (kv_rows,),
            "o_bias": (hidden,),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} but {list(shape)} is needed for x {list(x.shape)}, "
                    f"{num_heads} query heads and {num_kv_heads} KV heads of size {head_dim}"
                )
            if tensor.device != x.device:
                raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; move one of them")
            if tensor.dtype != x.dtype and not name.endswith("norm"):
                raise ValueError(f"{name} is {tensor.dtype} but x is {x.dtype}; convert one of them, or use autocast")
        return head_dim


def runs(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted heads as [start, stop) runs.

    >>> runs([0, 1, 4, 5, 6])
    [(0, 2), (4, 7)]
    """
    found: list[tuple[int, int]] = []
    for head in heads:
        if found and found[-1][1] == head:
            found[-1] = (found[-1][0], head + 1)
        else:
            found.append((head, head + 1))
    return found


def take_heads(weight: Tensor, heads: Sequence[int], head_dim: int, dim: int = 0) -> Tensor:
    """Return the rows (dim 0) or columns (dim 1) of sorted `heads`: a view of one run, else a copy of those alone."""
    pieces = [weight.narrow(dim, start * head_dim, (stop - start) * head_dim) for start, stop in runs(heads)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def put_heads(target: Tensor, value: Tensor, heads: Sequence[int], head_dim: int, dim: int = 0) -> None:
    """Write the rows or columns of sorted `heads` into `target`: the inverse of :func:`take_heads`."""
    done = 0
    for start, stop in runs(heads):
        size = (stop - start) * head_dim
        target.narrow(dim, start * head_dim, size).copy_(value.narrow(dim, done, size))
        done += size


class TileSum:
    """Sum over token tiles, in fp32 (fp64 for fp64) from the second tile on."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> None:
        """Add one tile's share, which the sum may keep."""
        self._count += 1
        if self._sum is None:
            self._sum = value
        elif self._count == 2:
            self._sum = self._sum.to(accumulate_dtype(value.dtype)).add_(value)
        else:
            self._sum.add_(value)

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum, rounded once."""
        assert self._sum is not None
        return self._sum.to(dtype)


@dataclass(frozen=True)
class HeadProjection:
    """One of q, k, v for some heads: linear, then norm and rotary where the layer has them.

    Norm and rotary are computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        weight: ``[n*D, d]``.
        bias: ``[n*D]`` or None.
        norm: ``[D]`` or None.
        eps: of the norm.
        head_dim: D.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None
    eps: float
    head_dim: int

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Project a tile ``[B, t, d]`` to ``[B, t, n, D]``; rotation is cos and sin ``[t, R/2]`` or ``[B, t, R/2]``."""
        rows = self._linear(x)
        if self.norm is None and rotation is None:
            return rows
        wide = rows.to(accumulate_dtype(rows.dtype))
        if self.norm is not None:
            wide = wide * self._inverse_rms(wide) * self.norm
        return wide if rotation is None else rotate(wide, *rotation)

    def backward(self, grad: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor | None]:
        """Take a gradient ``[B, t, n, D]`` back to the output of the linear.

        Returns:
            Its gradient ``[B*t, n*D]`` in the dtype of `x`, and the gradient of the norm's weight ``[D]`` or None.
        """
        dnorm = None
        if rotation is not None or self.norm is not None:
            grad = grad.to(accumulate_dtype(x.dtype))
        if rotation is not None:
            grad = rotate_transposed(grad, *rotation)
        if self.norm is not None:
            raw = self._linear(x).to(grad.dtype)
            inverse = self._inverse_rms(raw)
            unit = raw.mul_(inverse) if raw.dtype != x.dtype else raw * inverse
            dnorm = (grad * unit).sum((0, 1, 2))
            grad = grad * self.norm
            grad = inverse * (grad - unit * (grad * unit).mean(-1, keepdim=True))
        return grad.to(x.dtype).flatten(2).flatten(0, 1), dnorm

    def _linear(self, x: Tensor) -> Tensor:
        # As one matrix: a strided tile with a batch dim would become a batched product, which is slower.
        rows = F.linear(x.flatten(0, 1), self.weight, self.bias)
        return rows.view(x.shape[0], x.shape[1], -1, self.head_dim)

    def _inverse_rms(self, wide: Tensor) -> Tensor:
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
