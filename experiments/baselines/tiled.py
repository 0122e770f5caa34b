"""Norms and MLP in token tiles, as the published runs had them: the input is saved whole, the output returned whole.

Letters: B batch, S tokens of this rank, t tokens of a tile, d hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from upipe.memory.label import label


def tiled(module: nn.Module, x: Tensor, name: str) -> Tensor:
    """Apply `module` to ``[B, S, d]`` in ceil(S/d) token tiles; equals ``module(x)``.

    Saves the whole input; the output is concatenated from the tiles, so both exist for a moment. Backward recomputes
    tile by tile into a gradient of the whole input. Memory is labelled `name`, of a tile ``name.tile``.
    """
    y: Tensor = _Tiled.apply(module, name, x, *module.parameters())
    return y


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, name: str, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.name = module, name
        ctx.save_for_backward(x)
        with label(f"{name}.tile"):
            tiles = [module(tile) for tile in _cut(x)]
        with label(name):
            return torch.cat(tiles, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        parameters = list(ctx.module.parameters())
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        with label(f"{ctx.name}.dx"):
            dx = torch.empty_like(x)
        sums: list[Tensor] = []
        for tile, dx_tile, dy_tile in zip(_cut(x), _cut(dx), _cut(dy), strict=True):
            with label(f"{ctx.name}.tile"):
                found, *shares = _gradients(ctx.module, tile, wanted, dy_tile)
                dx_tile.copy_(found)
                sums = _sum(sums, shares)
                del found, shares
        left = iter(sums)
        return None, None, dx, *(next(left) if parameter.requires_grad else None for parameter in parameters)


def _sum(sums: list[Tensor], shares: list[Tensor]) -> list[Tensor]:
    """Add in the weights' dtype, as autograd accumulates into .grad."""
    for total, share in zip(sums, shares, strict=False):
        total.add_(share)
    return sums or shares


def _gradients(module: nn.Module, tile: Tensor, parameters: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaf = tile.detach().requires_grad_()
        y = module(leaf)
    return torch.autograd.grad(y, [leaf, *parameters], dy)


def _cut(x: Tensor) -> tuple[Tensor, ...]:
    tokens, hidden = x.shape[1:]
    return x.chunk(max(1, -(-tokens // hidden)), dim=1)
