"""The published blocks: the results of our plain block, the memory of the published runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.baselines import BLOCKS, BlockPeaks, alst, block_peaks, rotary_table, tiled, upipe_paper
from experiments.config import MethodConfig, ModelConfig
from experiments.model import Block
from upipe import memory, offload
from upipe.memory.timeline import Timeline
from upipe.testing import assert_exact, run_ranks

METHODS = ("alst", "upipe_paper")
SMALL = ModelConfig("small", hidden_size=16, layers=1, heads=8, kv_heads=4, head_dim=6, ffn=20, vocab=5, rope_theta=50)
LLAMA3_8B = ModelConfig("llama3_8b", 4096, 32, 32, 8, 14336, 128256, 500000, norm_eps=1e-5)
MILLION = 2**20
BATCH, TOKENS = 2, 37  # three MLP tiles of 13, 13 and 11 tokens


def fill(block: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * values if values.dim() == 1 else values * values.shape[1] ** -0.5)


def run(block: nn.Module, x: Tensor, dy: Tensor, positions: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, positions, None)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in block.named_parameters()}


def check_exact(method: str, group: dist.ProcessGroup | None, *, offload_input: bool = True) -> None:
    """Hold output and every gradient of this rank to those of our plain block with the same weights."""
    rank = 0 if group is None else dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(BATCH, TOKENS, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    # Positions differ by row, and by more than a shift, which rotary does not see.
    positions = (rank * TOKENS + torch.arange(TOKENS))[None] * torch.tensor([[1], [2]])
    plain = Block(SMALL, MethodConfig("ulysses"), group).double()
    fill(plain)
    published = BLOCKS[method](SMALL, group, "auto", offload_input=offload_input).double()
    published.load_state_dict(plain.state_dict())
    truth, ours = run(plain, x, dy, positions), run(published, x, dy, positions)
    assert list(ours) == list(truth)
    for name, value in ours.items():
        assert_exact(value, truth[name], f"{name} of {method}")


def check_on_ranks() -> None:
    for method in METHODS:
        check_exact(method, dist.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_the_plain_block(ranks: int) -> None:
    run_ranks(check_on_ranks, ranks)


@pytest.mark.parametrize("offload_input", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_input_stays_on_the_device_on_demand(method: str, offload_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Size] = []
    to_host = offload.to_host
    monkeypatch.setattr(offload, "to_host", lambda tensor: moved.append(tensor.shape) or to_host(tensor))
    check_exact(method, None, offload_input=offload_input)
    assert moved == ([torch.Size([BATCH, TOKENS, 16]), torch.Size([BATCH, TOKENS, 3])] if offload_input else [])


def pair_neighbours(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def turn_forward_only(x: Tensor, table: Tensor, direction: int = 1, rotate: Callable = upipe_paper.rotate_) -> None:
    rotate(x, table)


@pytest.mark.parametrize(
    ("method", "module", "name", "mutant"),
    [
        ("alst", alst, "_to_complex", pair_neighbours),
        ("upipe_paper", upipe_paper, "rotate_", turn_forward_only),
        ("upipe_paper", upipe_paper, "_sum", lambda sums, found: found),
        ("alst", tiled, "_sum", lambda sums, shares: shares),
        ("alst", tiled, "_cut", lambda x: x.flip(1).chunk(3, dim=1)),
    ],
)
def test_a_mutant_is_caught(
    method: str, module: object, name: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError, match="differs by"):
        check_exact(method, None)


@cache
def peaks(method: str, tokens: int) -> BlockPeaks:
    return block_peaks(method, LLAMA3_8B, 8, tokens)


@pytest.mark.parametrize("tokens", [MILLION, 3 * MILLION])
def test_alst_peaks(tokens: int) -> None:
    """The sums in the docstring of AlstBlock; 14.7 A are 44 GiB at 3M tokens."""
    found = peaks("alst", tokens)
    assert found.forward_peak == pytest.approx(9.8125, abs=0.01)
    assert found.backward_peak == pytest.approx(14.6406, abs=0.01)
    expected = {
        "block.input": 1,
        "attn.norm": 1,
        "dy": 1,
        "block.dh": 1,
        "attn.q": 1,
        "attn.kv": 0.5,
        "attn.out": 1,
        "attn.dout": 1,
        "ring.block": 1.5,
        "ring.fp32": 3,
        "attn.dqkv": 1.5,
        "ring.receive": 1,
        "rotary.table": 0.125,
        "ring.out_lse": 1 / 64,
    }
    assert found.backward == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("tokens", [MILLION, 3 * MILLION])
def test_upipe_paper_peaks(tokens: int) -> None:
    """The sums in the docstring of UPipePaperBlock; 11.15 A are 33 GiB at 3M tokens."""
    found = peaks("upipe_paper", tokens)
    assert found.forward_peak == pytest.approx(5.0781, abs=0.01)
    assert found.backward_peak == pytest.approx(11.1484, abs=0.01)
    expected = {
        "block.input": 1,
        "attn.norm": 1,
        "dy": 1,
        "block.dh": 1,
        "attn.dx": 1,
        "attn.out": 1,
        "attn.dout": 1,
        "attn.dout_by_stage": 1,
        "stage.q": 0.25,
        "stage.kv": 0.5,
        "stage.out": 0.25,
        "stage.dout": 0.25,
        "stage.dqkv": 1.25,
        "kernel.workspace": 0.5 + 1 / 128,
        "rotary.table": 0.125,
        "stage.out_lse": 1 / 64,
    }
    assert found.backward == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("method", METHODS)
def test_peaks_are_linear_in_tokens(method: str) -> None:
    """In units of the input nothing changes with T, and the host holds the input and the rotary table."""
    short, long = peaks(method, MILLION), peaks(method, 3 * MILLION)
    assert long.unit_bytes == 3 * short.unit_bytes
    assert long.forward_peak == pytest.approx(short.forward_peak, rel=1e-3)
    assert long.backward_peak == pytest.approx(short.backward_peak, rel=1e-3)
    assert long.host == short.host == 1 + 1 / 16


def small_stream(method: str, group: dist.ProcessGroup | None) -> Timeline:
    with torch.device("meta"):
        block = BLOCKS[method](SMALL, group, "auto").to(torch.bfloat16)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    table = rotary_table(SMALL, torch.arange(TOKENS), torch.bfloat16)
    x = torch.randn(BATCH, TOKENS, 16, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(BATCH, TOKENS, 16, dtype=torch.bfloat16)
    return memory.trace(lambda: block(x, table).backward(dy))


def real_and_fake(method: str) -> None:
    """Hold the stream of real tensors on this gloo rank to the one of fake tensors on a fake rank."""
    rank = dist.get_rank()
    exchange = dist.all_to_all_single

    def exchange_and_settle(*args: object, **kwargs: object) -> None:
        exchange(*args, **kwargs)
        time.sleep(0.01)  # gloo's worker thread lets go of the buffers a moment after the exchange is done

    dist.all_to_all_single = exchange_and_settle
    real = small_stream(method, dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    with memory.fake_ranks(2, rank=rank) as group:
        fake = small_stream(method, group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert len(real.stream()) > 300
    assert real.stream() == fake.stream()
    assert real.at_peak == fake.at_peak


@pytest.mark.parametrize("method", METHODS)
def test_real_tensors_give_the_stream_of_fake_ones(method: str) -> None:
    run_ranks(real_and_fake, 2, method)


class TestRefusals:
    @pytest.mark.parametrize("method", METHODS)
    def test_documents(self, method: str) -> None:
        block = BLOCKS[method](SMALL, None, "auto")
        with pytest.raises(ValueError, match="cu_seqlens must be None"):
            block(torch.zeros(1, 4, 16), torch.arange(4), torch.tensor([0, 4], dtype=torch.int32))

    @pytest.mark.parametrize("method", METHODS)
    def test_fewer_kv_heads_than_ranks(self, method: str) -> None:
        with pytest.raises(ValueError, match=r"kv_heads=4 must be a multiple of 8 ranks; valid ranks: 1, 2, 4\."):
            block_peaks(method, SMALL, 8, 64)

    @pytest.mark.parametrize("method", METHODS)
    def test_norms_of_q_and_k(self, method: str) -> None:
        model = ModelConfig("normed", 16, 1, 4, 2, ffn=20, vocab=5, rope_theta=50, qk_norm=True)
        with pytest.raises(ValueError, match="has no norms of q and k"):
            BLOCKS[method](model, None, "auto")

    def test_another_method(self) -> None:
        with pytest.raises(ValueError, match="method=upipe is not known; choose alst, upipe_paper"):
            block_peaks("upipe", SMALL, 2, 64)

    def test_tokens_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="tokens=63 must be a multiple of 2 ranks"):
            block_peaks("alst", SMALL, 2, 63)
