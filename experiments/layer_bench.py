"""One attention layer in several ways on the same tensors: timed in pairs on real ranks, or traced at full size.

Letters: B batch, S tokens of this rank, d hidden size, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from experiments.config import ModelConfig
from upipe import (
    AttentionMask,
    Projections,
    Rotary,
    UlyssesAttention,
    UPipeAttention,
    headwise_attention,
    memory,
    ulysses_attention,
)
from upipe.kernels import Kernel, select_kernel
from upipe.memory.timeline import Timeline

WEIGHTS = ("parameter", "gradient")
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """An attention layer on real ranks; heads_per_stage lists the values of U to compare."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    tokens: int
    heads_per_stage: tuple[int, ...]
    dtype: str
    seed: int
    deepspeed: bool


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


class _KernelAttention(torch.autograd.Function):
    """The kernel as plain autograd would run it: what DeepSpeed's layer gets as its local attention."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scale: float) -> Tensor:
        out, lse = kernel.forward(q, k, v, AttentionMask(), scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.scale = kernel, scale
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.kernel.backward(dout, *ctx.saved_tensors, AttentionMask(), ctx.scale), None, None)


def make_variants(spec: LayerSpec) -> tuple[dict[str, Layer], Tensor, Tensor, list[Tensor]]:
    """Return the variants by name, x and dy ``[1, S, d]`` and the weights, which all variants share."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = [
        (random(shape[0], shape[1]) / shape[1] ** 0.5).requires_grad_()
        for shape in ((rows, spec.hidden_size), *[(kv_rows, spec.hidden_size)] * 2, (spec.hidden_size, rows))
    ]
    local_tokens = spec.tokens // dist.get_world_size()
    x, dy = random(1, local_tokens, spec.hidden_size).requires_grad_(), random(1, local_tokens, spec.hidden_size)
    mask = AttentionMask()

    def around(core: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Layer:
        def layer(x: Tensor) -> Tensor:
            q, k, v = (F.linear(x, weight).unflatten(-1, (-1, spec.head_dim)) for weight in weights[:3])
            return F.linear(core(q, k, v).flatten(2), weights[3])

        return layer

    def headwise(heads_per_stage: int) -> Layer:
        return lambda x: headwise_attention(
            x,
            Projections(*weights),
            group=group,
            num_heads=spec.heads,
            num_kv_heads=spec.kv_heads,
            heads_per_stage=heads_per_stage,
            mask=mask,
        )

    ulysses = around(lambda q, k, v: ulysses_attention(q, k, v, group=group, mask=mask))
    variants: dict[str, Layer] = {}
    if spec.deepspeed:
        kernel = select_kernel("auto", mask, x.new_empty(0, spec.head_dim))
        variants["deepspeed"] = around(_deepspeed_attention(group, kernel, spec.head_dim**-0.5))
    variants["ulysses"] = ulysses
    variants["ulysses, checkpoint"] = lambda x: checkpoint(ulysses, x, use_reentrant=False)
    variants |= {f"upipe, U = {heads}": headwise(heads) for heads in spec.heads_per_stage}
    return variants, x, dy, weights


def _deepspeed_attention(
    group: dist.ProcessGroup, kernel: Kernel, scale: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """DeepSpeed's DistributedAttention on ``[B, S, heads, D]`` around the same kernel."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)  # DeepSpeed announces the accelerator in every rank
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    logging.disable(logging.NOTSET)
    attention = DistributedAttention(
        lambda q, k, v: _KernelAttention.apply(q, k, v, kernel, scale), group, scatter_idx=2, gather_idx=1
    )
    return lambda q, k, v: attention(q, k, v, 0)


def paired_rounds(spec: LayerSpec, first: int, count: int) -> dict[str, list[float]]:
    """Time forward plus backward of every variant once a round, in alternating order; runs in a rank.

    Returns:
        Seconds of the slowest rank, by variant and round.
    """
    variants, x, dy, weights = make_variants(spec)
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results = {name: _run(variants[name], x, dy, weights)[1] for name in names}  # also warms up
    for name, result in results.items():
        torch.testing.assert_close(result, results["ulysses"], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for index in range(first, first + count):
        for name in names if index % 2 else reversed(names):
            dist.barrier()
            elapsed = torch.tensor(_run(variants[name], x, dy, weights)[0], dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            seconds[name].append(float(elapsed))
    return seconds


def _run(layer: Layer, x: Tensor, dy: Tensor, weights: list[Tensor]) -> tuple[float, Tensor]:
    for tensor in (x, *weights):
        tensor.grad = None
    started = time.perf_counter()
    layer(x).backward(dy)
    return time.perf_counter() - started, x.grad


def live_peaks(spec: LayerSpec) -> dict[str, int]:
    """Return the traced live peak of forward plus backward of every variant, weights included; runs in a rank."""
    variants, x, dy, weights = make_variants(spec)
    peaks = {}
    for name, layer in variants.items():
        _run(layer, x, dy, weights)
        for tensor in (x, *weights):
            tensor.grad = None
        peaks[name] = memory.trace(lambda layer=layer: layer(x).backward(dy)).peak_bytes
    return peaks


@dataclass(frozen=True)
class TracedLayer:
    """Peaks of one traced layer beyond weights and their gradients; bytes, owners by name."""

    unit_bytes: int
    forward_bytes: int
    backward_bytes: int
    owners_at_peak: dict[str, int]


def trace_layer(model: ModelConfig, ranks: int, tokens: int, kernel: str, heads_per_stage: int | None) -> TracedLayer:
    """Trace forward, then backward with y dropped, of one rank's attention layer in bf16.

    Args:
        model: the geometry.
        ranks: C.
        tokens: of the whole sequence, a multiple of C.
        kernel: whose workspace is counted.
        heads_per_stage: U; None for plain Ulysses.
    """
    with memory.fake_ranks(ranks) as group:
        plain = heads_per_stage is None
        layer = (UlyssesAttention if plain else UPipeAttention)(
            model.hidden_size,
            model.heads,
            model.kv_heads,
            head_dim=model.head_size,
            group=group,
            heads_per_stage=heads_per_stage,
            rotary=Rotary(model.rope_theta, model.head_size, scaling=model.rope_scaling),
            kernel=kernel,
            dtype=torch.bfloat16,
        )
        x = torch.empty(1, tokens // ranks, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.empty_like(x)
        outputs: list[Tensor] = []
        forward = memory.trace(lambda: outputs.append(layer(x)))
        outputs.clear()

        def forward_and_backward() -> None:
            edge = torch.autograd.graph.get_gradient_edge(layer(x))  # y itself is dropped
            torch.autograd.backward((edge,), (dy,))

        # Both in one trace, so that what forward saved keeps its owner; the peak is backward's.
        backward: Timeline = memory.trace(forward_and_backward)
    return TracedLayer(
        unit_bytes=x.numel() * x.itemsize,
        forward_bytes=forward.peak_without(*WEIGHTS),
        backward_bytes=backward.peak_without(*WEIGHTS),
        owners_at_peak=backward.at_peak_without(*WEIGHTS),
    )
