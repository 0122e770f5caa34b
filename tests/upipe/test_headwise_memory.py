"""Memory of one attention layer, from traces: Llama3-8B's shape, one rank of 8, in units A of x."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from upipe import HeadSchedule, Rotary, UlyssesAttention, UPipeAttention, memory
from upipe.memory.timeline import Timeline
from upipe.testing import run_ranks

RANKS = 8
WEIGHTS = ("parameter", "gradient")


def layer_traces(
    heads_per_stage: int | None, tokens: int, *, plain: bool = False, keep_attention: bool = False
) -> tuple[float, Timeline, Timeline]:
    """Trace forward, then backward with y dropped; return A and both."""
    with memory.fake_ranks(RANKS) as group:
        layer = (UlyssesAttention if plain else UPipeAttention)(
            4096,
            32,
            8,
            group=group,
            heads_per_stage=heads_per_stage,
            rotary=Rotary(500000.0, 128),
            kernel="flash",
            keep_attention=keep_attention,
            dtype=torch.bfloat16,
        )
        x = torch.empty(1, tokens // RANKS, 4096, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.empty_like(x)
        outputs: list[torch.Tensor] = []
        forward = memory.trace(lambda: outputs.append(layer(x)))
        edge = torch.autograd.graph.get_gradient_edge(outputs.pop())
        backward = memory.trace(lambda: torch.autograd.backward((edge,), (dy,)))
        return x.numel() * x.itemsize, forward, backward


def units(heads_per_stage: int | None, tokens: int, **options: bool) -> tuple[float, float]:
    unit, forward, backward = layer_traces(heads_per_stage, tokens, **options)
    return forward.peak_without(*WEIGHTS) / unit, backward.peak_without(*WEIGHTS) / unit


def test_peak_at_3m_tokens() -> None:
    """x, dx and dy 2; dq of the stages before 0.75; k, v 0.5; fp32 sums 1; kernel 0.5 and its workspace 0.5; q, out,
    dout, dq 1; rotary tables 1/16; log-sum-exp 3/256: 6.32. y is not held, dx comes when the stages are over."""
    forward, backward = units(8, 3 * 2**20)
    assert forward <= 3.5
    assert backward <= 6.4
    assert backward >= 6.25  # the sum above: a trace that lost a buffer would stay below it


def test_peak_grows_with_heads_per_stage_up_to_ulysses() -> None:
    peaks = [units(heads_per_stage, 2**20)[1] for heads_per_stage in (8, 16, 24, 32)]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.65 * peaks[-1]
    ulysses = units(None, 2**20, plain=True)[1]
    assert abs(peaks[-1] - ulysses) <= 0.1 * ulysses


def test_peak_is_linear_in_tokens() -> None:
    """In units of x, the peak does not grow with T."""
    for short, long in zip(units(8, 2**20), units(8, 2**21), strict=True):
        assert long <= short * 1.001


def test_forward_keeps_x_only() -> None:
    """After forward only y is new; with keep_attention also the output of all heads and lse in fp32."""
    for keep_attention, expected in ((False, 1.0), (True, 2.0 + 32 / 8 * RANKS * 4 / 8192)):
        unit, forward, _ = layer_traces(8, 2**18, keep_attention=keep_attention)
        alive = sum(n for event in forward.events for n in event.new_bytes)
        alive -= sum(n for event in forward.events[:-1] for n in event.freed_bytes)
        # What the last op frees is gone before anybody looks.
        alive -= sum(forward.events[-1].freed_bytes)
        assert alive / unit == pytest.approx(expected, rel=0.002)


def test_attention_runs_and_exchanges_are_counted() -> None:
    """Attention forward twice (once when it is kept); head-tensors 2(H + K) in forward and 4(H + K) in backward."""
    schedule = HeadSchedule.build(32, 8, RANKS)
    for keep_attention, runs in ((False, 8), (True, 4)):
        _, forward, backward = layer_traces(8, 2**18, keep_attention=keep_attention)
        counts = {name: forward.op_counts.get(name, 0) + backward.op_counts.get(name, 0) for name in backward.op_counts}
        counts |= {name: count for name, count in forward.op_counts.items() if name not in counts}
        assert counts["upipe.flash_forward.default"] == runs
        assert counts["upipe.flash_backward.default"] == 4
        # forward: q and out a stage, k with v once; backward: q, out, dout and dq a stage, k with v, dk with dv once
        assert forward.op_counts["c10d.alltoall_base_.default"] == 2 * 4 + 1
        assert backward.op_counts["c10d.alltoall_base_.default"] == 4 * 4 + 2
    assert schedule.heads_moved == 2 * (32 + 8)


def real_and_fake(method: type[torch.nn.Module], heads_per_stage: int | None) -> None:
    """Hold the stream of real tensors on this gloo rank to the one of fake tensors on a fake rank."""
    rank = dist.get_rank()
    exchange = dist.all_to_all_single

    def exchange_and_settle(*args: object, **kwargs: object) -> None:
        exchange(*args, **kwargs)
        time.sleep(0.01)  # gloo's worker thread lets go of the buffers a moment after the exchange is done

    dist.all_to_all_single = exchange_and_settle
    real = small_stream(method, heads_per_stage, dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    with memory.fake_ranks(2, rank=rank) as group:
        fake = small_stream(method, heads_per_stage, group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert len(real.stream()) > 50
    assert real.stream() == fake.stream()
    assert real.at_peak == fake.at_peak


def small_stream(
    method: type[torch.nn.Module], heads_per_stage: int | None, group: dist.ProcessGroup | None
) -> Timeline:
    torch.manual_seed(0)
    layer = method(24, 6, 2, group=group, heads_per_stage=heads_per_stage, rotary=Rotary(100.0, 4), qk_norm=True)
    x, dy = torch.randn(2, 5, 24, requires_grad=True), torch.randn(2, 5, 24)
    return memory.trace(lambda: layer(x).backward(dy))


@pytest.mark.parametrize(
    ("method", "heads_per_stage"), [(UPipeAttention, 2), (UPipeAttention, 6), (UlyssesAttention, None)]
)
def test_real_tensors_give_the_stream_of_fake_ones(method: type[torch.nn.Module], heads_per_stage: int | None) -> None:
    run_ranks(real_and_fake, 2, method, heads_per_stage)
