"""The fused block against the plain one: output and every gradient, each dial, and who owns dy."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from experiments.config import MethodConfig, ModelConfig
from experiments.model import Block
from upipe import UlyssesAttention, block
from upipe.block import HeadwiseBlock
from upipe.integrations.fsdp import sum_gradients
from upipe.testing import assert_exact, run_ranks

MODEL = ModelConfig("test", 24, layers=1, heads=6, kv_heads=3, ffn=40, vocab=11, rope_theta=100.0, qk_norm=True)
TOKENS = 7  # of a rank


def make_block(group: dist.ProcessGroup | None, heads_per_stage: int | None = None, keep: bool = False) -> Block:
    torch.manual_seed(3)
    plain = Block(MODEL, MethodConfig("upipe", heads_per_stage, keep), group).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    return plain


def shares(rank: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + rank)
    x = torch.randn(batch, TOKENS, 24, dtype=torch.float64)
    return x, torch.randn(batch, TOKENS, 24, dtype=torch.float64), torch.arange(rank * TOKENS, (rank + 1) * TOKENS)


def compare(heads_per_stage: int | None, keep: bool, tile_tokens: int | None, frozen: tuple[str, ...] = ()) -> None:
    """Output and gradients of this rank's part; the schemes underneath are compared with the dense truth elsewhere."""
    group = dist.group.WORLD if dist.is_initialized() else None
    plain = make_block(group, heads_per_stage, keep)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    fused = HeadwiseBlock.from_block(copy.deepcopy(plain), tile_tokens=tile_tokens)
    x, dy, positions = shares(dist.get_rank() if group else 0)
    outputs = []
    for module in (plain, fused):
        leaf = x.clone().requires_grad_("x" not in frozen)
        y = module(leaf, positions, None)
        y.mul(1.5).backward(dy)
        outputs.append((y, leaf.grad))
    for name, ours, expected in zip(("y", "x"), outputs[1], outputs[0], strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            assert_exact(ours, expected, name)
    for (name, ours), expected in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None), name
        if ours.grad is not None and expected.grad is not None:
            assert_exact(ours.grad, expected.grad, name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("heads_per_stage", "tile_tokens"), [(1, None), (2, 3), (6, 5)])
def test_equals_the_plain_block(heads_per_stage: int, keep: bool, tile_tokens: int | None) -> None:
    compare(heads_per_stage, keep, tile_tokens)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_equals_the_plain_block_on_ranks(ranks: int, keep: bool) -> None:
    run_ranks(compare, ranks, None, keep, 3)


@pytest.mark.parametrize("frozen", [("x",), ("q_proj", "mlp"), ("layernorm",), ("o_proj", "down_proj", "q_norm")])
def test_frozen_weights(frozen: tuple[str, ...]) -> None:
    compare(2, False, 3, frozen)


def test_the_comparison_can_fail() -> None:
    """A block that forgets the residual's gradient, and one that drops a tile, are caught."""

    def no_residual(*args: object) -> None:
        block_back(*args)
        args[-1].zero_()

    block_back = block._back_through_mlp
    with mock.patch.object(block, "_back_through_mlp", no_residual), pytest.raises(AssertionError, match="x: differs"):
        compare(2, False, 3)
    with (
        mock.patch.object(block.BlockPlan, "tiles", lambda self, tokens: [slice(0, tokens - 1)]),
        pytest.raises(AssertionError),
    ):
        compare(2, False, 3)


def gradients_of_x(module: nn.Module, how: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradient of x, and what a bystander sees of dy after backward."""
    x, dy, positions = shares(0, batch=1)
    x.requires_grad_()
    y = module(x, positions, None)
    seen: list[torch.Tensor] = []
    if how == "residual":
        (x.sin() + y).backward(dy)
        return x.grad, dy
    if how == "hook":
        y.register_hook(seen.append)
        (y * 2).backward(dy)
        return x.grad, seen[0]
    if how == "given":
        y.backward(dy)
        return x.grad, dy
    if how == "expanded":
        y.sum().backward()
        return x.grad, None
    if how == "retained":
        y.retain_grad()
        (y * 2).backward(dy)
        return x.grad, y.grad
    if how == "twice":
        (y * 2).backward(dy, retain_graph=True)
        (y * 2).backward(dy)
        return x.grad, dy
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["residual", "hook", "given", "expanded", "retained", "twice"])
def test_a_gradient_that_others_see_is_not_overwritten(how: str) -> None:
    plain = make_block(None)
    fused = HeadwiseBlock.from_block(copy.deepcopy(plain), tile_tokens=3)
    expected, ours = gradients_of_x(plain, how), gradients_of_x(fused, how)
    assert_exact(ours[0], expected[0], "x")
    assert (ours[1] is None) == (expected[1] is None)
    if ours[1] is not None and expected[1] is not None:
        assert torch.equal(ours[1], expected[1])


def test_overwriting_a_shared_gradient_would_be_seen() -> None:
    """The mutant that always overwrites fails the test above."""
    plain = make_block(None)
    fused = HeadwiseBlock.from_block(copy.deepcopy(plain), tile_tokens=3)
    for how in ("residual", "hook", "given"):
        expected = gradients_of_x(plain, how)
        with mock.patch.object(block, "_is_ours", return_value=True):
            ours = gradients_of_x(fused, how)
        assert not (torch.equal(ours[1], expected[1]) and torch.allclose(ours[0], expected[0]))


def test_a_gradient_of_ours_is_overwritten() -> None:
    fused = HeadwiseBlock.from_block(make_block(None))
    x, dy, positions = shares(0)
    found = []
    is_ours = block._is_ours
    with mock.patch.object(block, "_is_ours", lambda tensor: found.append(is_ours(tensor))):
        (fused(x.requires_grad_(), positions) * 2).backward(dy)
    assert found == [False]  # one more frame holds it here
    probe = []
    clone = torch.Tensor.clone
    with mock.patch.object(
        torch.Tensor, "clone", lambda self, **options: probe.append(options) or clone(self, **options)
    ):
        (fused(x, positions) * 2).backward(dy)
    assert probe == []


def sharded_equals_whole(keep: bool) -> None:
    """FSDP2 with reshard after forward and accumulation; weights have no storage between forward and backward."""
    group = dist.group.WORLD
    whole = make_block(group, None, keep)
    fused = HeadwiseBlock.from_block(copy.deepcopy(whole), tile_tokens=3)
    fully_shard(fused, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
    sum_gradients(fused)
    for repeat in range(2):
        x, dy, positions = shares(dist.get_rank() + 10 * repeat)
        expected, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        (whole(expected, positions, None) * 1.5).backward(dy)
        y = fused(ours, positions)
        assert isinstance(fused, FSDPModule)
        unsharded = [p._unsharded_param for p in fused._get_fsdp_state()._fsdp_param_group.fsdp_params]
        assert {parameter.untyped_storage().nbytes() for parameter in unsharded} == {0}
        (y * 1.5).backward(dy)
        assert_exact(ours.grad, expected.grad, "x")
    for (name, ours), expected in zip(fused.named_parameters(), whole.parameters(), strict=True):
        total = expected.grad.clone()
        dist.all_reduce(total)
        assert_exact(ours.grad.full_tensor(), total, name)


@pytest.mark.parametrize("keep", [False, True])
def test_under_fsdp2(keep: bool) -> None:
    run_ranks(sharded_equals_whole, 2, keep)


def test_refusals() -> None:
    plain = make_block(None)
    with pytest.raises(ValueError, match="UlyssesAttention; HeadwiseBlock needs a UPipeAttention"):
        HeadwiseBlock(plain.input_layernorm, UlyssesAttention(24, 6, 3, group=None), plain.input_layernorm, plain.mlp)
    with pytest.raises(ValueError, match=r"Linear is not norm, attention, norm, MLP: no input_layernorm, self_attn"):
        HeadwiseBlock.from_block(nn.Linear(2, 2))
    plain.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="also extra"):
        HeadwiseBlock.from_block(plain)
    del plain.extra
    plain.mlp = nn.Sequential(plain.mlp, nn.BatchNorm1d(TOKENS))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        HeadwiseBlock.from_block(plain)
    fused = HeadwiseBlock.from_block(make_block(None))
    x = shares(0)[0]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="leave autocast off"):
        fused(x)
    with pytest.raises(ValueError, match="tile_tokens=0"):
        HeadwiseBlock.from_block(make_block(None), tile_tokens=0)(x)
    narrow = make_block(None)
    narrow.mlp = nn.Linear(24, 5).double()
    with pytest.raises(ValueError, match="one tensor of the same shape"):
        HeadwiseBlock.from_block(narrow)(x)
