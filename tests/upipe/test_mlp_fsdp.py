"""The tiled MLP under DDP and FSDP2 at any level: gradients of one process, collectives of the untiled module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from upipe import memory, mlp
from upipe.integrations.fsdp import sum_gradients
from upipe.mlp import tiled_mlp
from upipe.testing import RankError, assert_exact, assert_within_budget, relative_error, run_ranks

RANKS, HIDDEN, FFN = 2, 6, 8
TOKENS = (10, 7)  # of each rank: another number of tiles on each
TILE = 3


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), SwiGLU()
        self.call: Callable[[nn.Module, Tensor], Tensor] = untiled
        self.outer = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer * self.call(self.mlp, self.norm(x))


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(HIDDEN, HIDDEN)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def untiled(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def tiled(module: nn.Module, x: Tensor) -> Tensor:
    return tiled_mlp(module, x, tile_tokens=TILE)


class BackwardPerTile(torch.autograd.Function):
    """What people ship: a nested backward a tile, into the parameters themselves."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([module(rows) for rows in x.split(TILE, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        grads = []
        for rows, upstream in zip(ctx.saved_tensors[0].split(TILE, dim=1), dy.split(TILE, dim=1), strict=True):
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                ctx.module(rows).backward(upstream)
            grads.append(rows.grad)
        return None, torch.cat(grads, dim=1), *(None for _ in ctx.needs_input_grad[2:])


def backward_per_tile(module: nn.Module, x: Tensor) -> Tensor:
    return BackwardPerTile.apply(module, x, *module.parameters())


def use(model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for block in model.modules():
        if isinstance(block, Block):
            block.call = call


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# FSDP2


def groups_of(block: Block, level: str) -> list[Any]:
    """What is wrapped by itself in a block, innermost first."""
    linears = [block.mlp.gate, block.mlp.up, block.mlp.down]
    return {
        "block": [block],
        "mlp": [block.mlp],
        "linear": linears,
        "linear and block": [*linears, block],
        "linear and mlp": [block.mlp.up, block.mlp],
        "two linears as one": [linears[:2], block],
    }[level]


LEVELS = ["block", "mlp", "linear", "linear and block", "linear and mlp", "two linears as one"]


def wrap(model: Model, level: str, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        for group in groups_of(block, level):
            fully_shard(group, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    sum_gradients(model)


def micro_batches(count: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Inputs and upstream gradients of all ranks."""
    for index in range(count):
        yield tuple(
            [random(2, tokens, HIDDEN, seed=10 * index + 2 * rank + kind) for rank, tokens in enumerate(TOKENS)]
            for kind in range(2)
        )


def gathered(model: nn.Module) -> list[Tensor]:
    """The weights that FSDP2 keeps whole at the moment, of all groups but the root's."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)][1:]
    unsharded = [parameter._unsharded_param for group in groups for parameter in group.fsdp_params]
    return [tensor for tensor in unsharded if tensor.untyped_storage().nbytes()]


def hold_fsdp_to_one_process(
    level: str, reshard: bool, accumulation: int, frozen: tuple[str, ...] = (), checkpointed: bool = False
) -> None:
    """Two steps; the number of collectives of each kind is that of the untiled model, wrapped alike."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = Model(checkpointed=checkpointed).double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    model, baseline = copy.deepcopy(plain), copy.deepcopy(plain)
    for wrapped, call in ((model, tiled), (baseline, untiled)):
        use(wrapped, call)
        wrap(wrapped, level, reshard_after_forward=reshard)
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        for xs, dys in micro_batches(accumulation):
            counts = []
            for wrapped in (baseline, model):
                x = xs[rank].clone().requires_grad_("x" not in frozen)
                outputs: list[Tensor] = []
                forward = memory.trace(lambda wrapped=wrapped, x=x, outputs=outputs: outputs.append(wrapped(x)))
                if reshard:
                    assert not gathered(wrapped), "weights stay gathered after forward"
                backward = memory.trace(lambda outputs=outputs, dy=dys[rank]: outputs[0].backward(dy))
                assert not gathered(wrapped), "weights stay gathered after backward"
                counts.append([collectives(timeline) for timeline in (forward, backward)])
            assert counts[0] == counts[1]
            assert counts[0][1]["c10d._reduce_scatter_base_.default"] >= 3
            for other, (one, upstream) in enumerate(zip(xs, dys, strict=True)):
                whole = one.clone().requires_grad_()
                expected = plain(whole)
                expected.backward(upstream)
                if other == rank:
                    assert_exact(outputs[0].detach(), expected.detach(), "y")
                    if "x" not in frozen:
                        assert_exact(x.grad, whole.grad, "x")
        hold_gradients(model, plain)


def collectives(timeline: memory.Timeline) -> dict[str, int]:
    return {op: count for op, count in timeline.op_counts.items() if op.startswith("c10d.")}


def hold_gradients(model: nn.Module, plain: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name
        if parameter.grad is None:
            assert found[name].grad is None, name
        else:
            assert_exact(found[name].grad.full_tensor(), parameter.grad, name)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_under_fsdp2(level: str) -> None:
    run_ranks(hold_fsdp_to_one_process, RANKS, level, True, 2)


@pytest.mark.parametrize("level", ["block", "linear and mlp"])
def test_gradients_with_weights_that_stay_gathered_after_forward(level: str) -> None:
    run_ranks(hold_fsdp_to_one_process, RANKS, level, False, 1)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("level", ["block", "linear"])
def test_accumulation_under_fsdp2(level: str, accumulation: int) -> None:
    run_ranks(hold_fsdp_to_one_process, RANKS, level, True, accumulation)


@pytest.mark.parametrize("frozen", [("x", "mlp.up"), ("mlp.gate", "norm")], ids="+".join)
def test_frozen_weights_under_fsdp2(frozen: tuple[str, ...]) -> None:
    run_ranks(hold_fsdp_to_one_process, RANKS, "linear", True, 1, frozen)


@pytest.mark.parametrize("level", ["mlp", "linear and block"])
def test_checkpointed_blocks_under_fsdp2(level: str) -> None:
    run_ranks(hold_fsdp_to_one_process, RANKS, level, True, 1, (), True)


def hooks_run_as_in_forward() -> None:
    """Without the state of activation checkpointing, the first tile would release the weights."""
    states = mock.Mock(PRE_BACKWARD=mlp.TrainingState.FORWARD)
    with mock.patch.object(mlp, "TrainingState", states):
        hold_fsdp_to_one_process("linear", True, 1)


def test_hooks_that_run_once_a_tile_are_noticed() -> None:
    with pytest.raises(RankError):
        run_ranks(hooks_run_as_in_forward, RANKS)


def evaluated() -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    use(model, tiled)
    wrap(model, "linear and mlp", reshard_after_forward=True)
    x = random(2, TOKENS[torch.distributed.get_rank()], HIDDEN, seed=0)
    with torch.no_grad():
        assert_exact(model(x), plain(x), "y")
    assert not gathered(model)


def test_evaluation_under_fsdp2() -> None:
    run_ranks(evaluated, RANKS)


def in_bf16(level: str) -> None:
    """Casts happen in each tile where the untiled module has them: the norm sees x in fp32."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = Model().float()
    truth = copy.deepcopy(plain).double()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for call in (untiled, tiled):
        model = copy.deepcopy(plain)
        use(model, call)
        for block in model.blocks:
            block.mlp = nn.Sequential(block.norm, block.mlp)
            block.norm = nn.Identity()
            mesh = init_device_mesh("cpu", (RANKS,))
            for group in {"linear": block.mlp[1].children(), "sequence": [block.mlp]}[level]:
                fully_shard(group, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        sum_gradients(model)
        x = random(2, TOKENS[rank], HIDDEN, seed=rank).float().requires_grad_()
        y = model(x)
        y.backward(random(*y.shape, seed=5 + rank).float())
        grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        results.append({"y": y.detach(), "x": x.grad} | grads)
    for other in range(RANKS):
        x = random(2, TOKENS[other], HIDDEN, seed=other).float().double().requires_grad_()
        y = truth(x)
        y.backward(random(*y.shape, seed=5 + other).float().double())
        if other == rank:
            exact = {"y": y.detach(), "x": x.grad}
    for name, parameter in truth.named_parameters():
        exact[name.replace(".mlp.", ".mlp.1.").replace(".norm.", ".mlp.0.")] = parameter.grad
    baseline, ours = results
    assert ours.keys() == exact.keys()
    for name, value in ours.items():
        assert value.dtype == baseline[name].dtype
        error = relative_error(baseline[name], exact[name])
        assert_within_budget(relative_error(value, exact[name]), max(error, 1e-6), name)
        assert error < 0.03, name


@pytest.mark.parametrize("level", ["linear", "sequence"])
def test_mixed_precision_under_fsdp2(level: str) -> None:
    run_ranks(in_bf16, RANKS, level)


class Sometimes(nn.Module):
    """An expert for tokens that are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(HIDDEN, HIDDEN), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + (self.expert(x) if (x[..., 0] > 0).any() else 0)


def expert_without_tokens(kind: str) -> None:
    """One rank has no token for the expert; its share of the gradient is zero, and nobody waits for it."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = Sometimes().double()
    model: nn.Module = copy.deepcopy(plain)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (model.expert, model):
            fully_shard(part, mesh=mesh)
        sum_gradients(model)
        tiled(model, signed(rank)).backward(upstream(rank))
    else:
        outer = DistributedDataParallel(Tiled(model))
        outer(signed(rank)).backward(upstream(rank))
    for other in range(RANKS):
        plain(signed(other)).backward(upstream(other))
    for name, parameter in plain.named_parameters():
        value = model.get_parameter(name).grad
        value = value.full_tensor() if kind == "fsdp" else RANKS * value  # DDP averages
        assert_exact(value, parameter.grad, name)


def signed(rank: int) -> Tensor:
    return random(2, TOKENS[rank], HIDDEN, seed=rank).abs() * (1 - 2 * rank)


def upstream(rank: int) -> Tensor:
    return random(2, TOKENS[rank], HIDDEN, seed=7 + rank)


class Tiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return tiled(self.inner, x)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_an_expert_without_tokens_on_one_rank(kind: str) -> None:
    run_ranks(expert_without_tokens, RANKS, kind)


# DDP


def hold_ddp_to_one_process(
    call: Callable[[nn.Module, Tensor], Tensor], accumulation: int, sync_once: bool = False
) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    use(model, call)
    ddp = DistributedDataParallel(model)
    for index, (xs, dys) in enumerate(micro_batches(accumulation)):
        with ddp.no_sync() if sync_once and index < accumulation - 1 else nullcontext():
            y = ddp(xs[rank])
            y.backward(dys[rank])
        for one, upstream in zip(xs, dys, strict=True):
            plain(one).backward(upstream)
    for name, parameter in plain.named_parameters():
        assert_exact(RANKS * model.get_parameter(name).grad, parameter.grad, name)


@pytest.mark.parametrize(("accumulation", "sync_once"), [(1, False), (2, False), (2, True), (3, True)])
def test_gradients_under_ddp(accumulation: int, sync_once: bool) -> None:
    run_ranks(hold_ddp_to_one_process, RANKS, tiled, accumulation, sync_once)


def test_a_backward_per_tile_is_noticed() -> None:
    with pytest.raises(RankError):
        run_ranks(hold_ddp_to_one_process, RANKS, backward_per_tile, 1)


# Refusals


def refusals() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    x = torch.randn(2, 5, HIDDEN)
    block = Block()
    fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match=r"^weight gate.weight is a DTensor \(Shard\(dim=0\),\): .* fully_shard wraps"):
        tiled_mlp(block.mlp, x)
    pair = Block()
    fully_shard([pair.norm, pair.mlp], mesh=mesh)
    with pytest.raises(ValueError, match=r"^a \w+ shares an FSDP2 group with modules outside mlp; give it"):
        tiled_mlp(pair.mlp, x)
    with pytest.raises(ValueError, match=r"^0 is a DistributedDataParallel, whose hooks would run once a tile"):
        tiled_mlp(nn.Sequential(DistributedDataParallel(SwiGLU())), x)


def test_weights_that_no_tile_can_gather_are_refused() -> None:
    run_ranks(refusals, RANKS)
