"""Traced memory of one published block, in units A = B*S*d*2 bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.baselines.alst import AlstBlock
from experiments.baselines.shell import rotary_table
from experiments.baselines.upipe_paper import UPipePaperBlock
from experiments.config import ModelConfig, one_of
from upipe import memory
from upipe.memory.label import label
from upipe.memory.timeline import Timeline

BLOCKS = {"alst": AlstBlock, "upipe_paper": UPipePaperBlock}
WEIGHTS = ("parameter", "gradient")


@dataclass(frozen=True)
class BlockPeaks:
    """Owners at the peaks of one block, in units A, weights and their gradients left out.

    Args:
        unit_bytes: A.
        forward: owner -> A at the peak of the forward.
        backward: the same of the backward, its recompute included.
        host: A on the host after the forward.
    """

    unit_bytes: int
    forward: dict[str, float]
    backward: dict[str, float]
    host: float

    @property
    def forward_peak(self) -> float:
        return sum(self.forward.values())

    @property
    def backward_peak(self) -> float:
        return sum(self.backward.values())


def block_peaks(method: str, model: ModelConfig, ranks: int, tokens: int, *, kernel: str = "flash") -> BlockPeaks:
    """Trace forward and backward of one bf16 block on one rank of `ranks`, under fake tensors.

    The caller holds x during the forward, and dy, but neither x nor y, during the backward: x comes from the host.
    Where only autograd holds dy, as inside a stack of blocks, the backward peak is 1 A lower. One rotary table, made
    before, stays on the device.

    Args:
        method: "alst" or "upipe_paper".
        model: the geometry.
        ranks: C.
        tokens: of the whole sequence, a multiple of C.
        kernel: whose workspace is counted.

    Raises:
        ValueError: another method, tokens that do not divide, or a geometry the block refuses.
    """
    one_of("method", method, tuple(BLOCKS))
    if tokens % ranks:
        raise ValueError(f"tokens={tokens} must be a multiple of {ranks} ranks")
    with memory.fake_ranks(ranks) as group:
        with torch.device("meta"):
            block = BLOCKS[method](model, group, kernel).to(torch.bfloat16)
        block.to_empty(device="cpu")
        table = rotary_table(model, torch.arange(tokens // ranks), torch.bfloat16)
        timeline = memory.trace(
            lambda: _step(block, (1, tokens // ranks, model.hidden_size), table), owners={"rotary.table": [table]}
        )
    unit = tokens // ranks * model.hidden_size * 2
    forward, backward = _halves(timeline)
    return BlockPeaks(
        unit_bytes=unit,
        forward={owner: n / unit for owner, n in forward.at_peak_without(*WEIGHTS).items()},
        backward={owner: n / unit for owner, n in backward.at_peak_without(*WEIGHTS).items()},
        host=forward.host_peak_bytes / unit,
    )


def _step(block: torch.nn.Module, shape: tuple[int, ...], table: Tensor) -> None:
    with label("block.input"):
        x = _Before.apply(torch.empty((), dtype=torch.bfloat16, requires_grad=True), shape)
    y = block(x, table)
    edge = torch.autograd.graph.get_gradient_edge(y)
    del x, y
    with label("dy"):
        dy = torch.empty(shape, dtype=torch.bfloat16)
    torch.autograd.backward((edge,), (dy,))


class _Before(torch.autograd.Function):
    """Whatever stands before the block. Its output is no leaf, which autograd would hold through the backward."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return seed.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx.new_empty(()), None


def _halves(timeline: Timeline) -> tuple[Timeline, Timeline]:
    """Cut where dy appears; what is alive there is the second half's baseline."""
    cut = next(i for i, event in enumerate(timeline.events) if event.label == "dy")
    live = Counter(timeline.baseline)
    for event in timeline.events[:cut]:
        live.update(event.new)
        live.subtract(event.freed)
    return (
        Timeline(timeline.baseline, timeline.events[:cut]),
        Timeline(tuple(live.elements()), timeline.events[cut:]),
    )
