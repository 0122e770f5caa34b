"""Memory of a fused block, from traces: one rank of 8, in units A of its input, beyond weights and their gradients."""

from __future__ import annotations

import pytest
import torch

from experiments.config import MethodConfig, ModelConfig
from experiments.model import Block
from upipe import HeadSchedule, memory
from upipe.block import HeadwiseBlock
from upipe.memory.timeline import Timeline

LLAMA3_8B = ModelConfig("llama3_8b", 4096, 32, 32, 8, 14336, 128256, 500000.0)
QWEN3_32B = ModelConfig("qwen3_32b", 5120, 64, 64, 8, 25600, 128256, 1000000.0, head_dim=128)
WEIGHTS = ("parameter", "gradient")


def block_traces(
    model: ModelConfig, ranks: int, tokens: int, *, heads_per_stage: int | None = None, keep: bool = False
) -> tuple[float, Timeline, Timeline]:
    """Trace forward, then backward with y dropped and dy held by autograd alone; return A and both."""
    with memory.fake_ranks(ranks) as group:
        with torch.device("meta"):
            plain = Block(model, MethodConfig("upipe", heads_per_stage, keep, "flash"), group).to(torch.bfloat16)
        fused = HeadwiseBlock.from_block(plain).to_empty(device="cpu")
        x = torch.empty(1, tokens // ranks, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        owners = {"parameter": list(fused.parameters())}
        outputs: list[torch.Tensor] = []
        forward = memory.trace(lambda: outputs.append(fused(x)), owners=owners)
        # A scalar loss, so that dy is made in backward and nobody but autograd has it.
        loss = _Seed.apply(outputs.pop())
        backward = memory.trace(loss.backward, owners=owners)
        return x.numel() * x.itemsize, forward, backward


class _Seed(torch.autograd.Function):
    """A loss whose gradient is a tensor of its own."""

    @staticmethod
    def forward(ctx, y):
        ctx.like = y.new_empty(0), y.shape
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, scale):
        like, shape = ctx.like
        return like.new_empty(shape)


def units(*args: object, **options: object) -> tuple[float, float]:
    unit, forward, backward = block_traces(*args, **options)
    return forward.peak_without(*WEIGHTS) / unit, backward.peak_without(*WEIGHTS) / unit


def test_llama_at_1m_tokens() -> None:
    """x and dh 2; out and dq 0.75; k, v 0.5; fp32 sums 1; kernel 0.5 and its workspace 0.5; q, out, dout, dq 1: 6.25,
    with rotary tables and log-sum-exp 6.34."""
    forward, backward = units(LLAMA3_8B, 8, 2**20)
    assert forward <= 3.2
    assert 6.25 <= backward <= 6.6


@pytest.mark.slow
def test_qwen_shape() -> None:
    assert units(QWEN3_32B, 8, 2**20)[1] <= 7


@pytest.mark.slow
def test_one_gpu_one_head_at_a_time() -> None:
    assert units(LLAMA3_8B, 1, 2**17, heads_per_stage=1)[1] <= 4.6


def test_attention_runs_and_exchanges_are_counted() -> None:
    """Attention forward twice a step, once when it is kept; at most 8(H + K) head-tensors, 6(H + K) when kept."""
    moved = HeadSchedule.build(32, 8, 8).heads_moved  # 2(H + K)
    for keep, runs, factor in ((False, 2, 4), (True, 1, 3)):
        _, forward, backward = block_traces(LLAMA3_8B, 8, 2**15, keep=keep)
        stages = 4
        counts = [timeline.op_counts for timeline in (forward, backward)]
        assert sum(count.get("upipe.flash_forward.default", 0) for count in counts) == runs * stages
        exchanges = sum(count["c10d.alltoall_base_.default"] for count in counts)
        # A query exchange moves U heads, one of K with V 2K; each pass has one of the latter.
        kv_exchanges = 4 if not keep else 3
        heads = (exchanges - kv_exchanges) * 8 + kv_exchanges * 16
        assert heads <= factor * moved
