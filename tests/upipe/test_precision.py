"""bf16 errors against fp64, held to a budget of 1.25 times those of plain Ulysses on the same rounded inputs."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.upipe.cases import Case, Inputs, dense, make_inputs, on_ranks
from upipe import local_attention, rank_pass
from upipe.projections import take_heads
from upipe.rank_pass import RankPass
from upipe.testing import assert_within_budget, relative_error, run_ranks

FACTOR = 1.25
TOKENS = 64
GEOMETRIES = {"llama3_8b": (32, 8), "qwen3_32b": (64, 8), "one_kv_head": (32, 1)}


def case_of(model: str, ranks: int, heads_per_stage: int, kernel: str = "blocked") -> Case:
    """The blocked kernel rounds once, so that it hides nothing of what the layer does."""
    num_heads, num_kv_heads = GEOMETRIES[model]
    return Case(
        local_tokens=TOKENS // ranks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_stage=heads_per_stage,
        head_dim=128,
        hidden=72,
        theta=5e5,
        qk_norm=model.startswith("qwen3"),
        kernel=kernel,
    )


def rounded(case: Case, ranks: int) -> tuple[Inputs, Inputs]:
    """The same inputs in bf16 and, with equal values, in fp64."""
    low = make_inputs(case, ranks, torch.bfloat16)
    wide = Inputs(
        x=low.x.double(),
        dy=low.dy.double(),
        weights={name: weight.double() for name, weight in low.weights.items()},
        sinks=None,
        positions=low.positions,
        cu_seqlens=None,
    )
    return low, wide


def errors(case: Case, truth: dict[str, Tensor], inputs: Inputs, method: str) -> dict[str, float]:
    """Relative errors over the whole sequence; weight gradients are summed over ranks in fp64, so that only the
    layer's own rounding counts."""
    group = dist.group.WORLD
    ours = on_ranks(case, inputs, method, group, sum_weights=False)
    found = {}
    for name, value in ours.items():
        whole = value.double()
        if name in ("y", "x"):
            parts = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(parts, whole, group=group)
            whole = torch.cat(parts, dim=1)
        else:
            dist.all_reduce(whole, group=group)
        found[name] = relative_error(whole, truth[name])
    return found


def compare(cases: list[Case], ranks: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Errors of upipe and of plain Ulysses for cases that differ in U only."""
    inputs, wide = rounded(cases[0], ranks)
    truth = dense(cases[0], wide)
    baseline = errors(cases[0], truth, inputs, "ulysses")
    return [(errors(case, truth, inputs, "upipe"), baseline) for case in cases]


def hold_to_budget(ours: dict[str, float], baseline: dict[str, float]) -> None:
    assert set(ours) == set(baseline)
    for name, error in ours.items():
        assert 0 < baseline[name] < 0.02, f"{name}: the baseline's error is {baseline[name]}"
        assert_within_budget(error, baseline[name], name, factor=FACTOR)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", GEOMETRIES)
def test_error_within_budget_of_ulysses(model, ranks):
    """U = C, which is 32 and 64 stages on one rank, and 4C."""
    cases = [case_of(model, ranks, heads_per_stage) for heads_per_stage in (ranks, 4 * ranks)]
    for ours, baseline in run_ranks(compare, ranks, cases, ranks)[0]:
        hold_to_budget(ours, baseline)


@pytest.mark.parametrize("model", GEOMETRIES)
def test_error_within_budget_of_ulysses_with_the_fastest_kernel(model):
    for ours, baseline in run_ranks(compare, 2, [case_of(model, 2, 2, "auto")], 2)[0]:
        hold_to_budget(ours, baseline)


# Mutants: sums over the stages of one rank in bf16


def kv_gradients_summed_in_bf16() -> Any:
    return mock.patch.object(local_attention, "accumulate_dtype", lambda dtype: dtype)


def output_projected_once_a_stage() -> Any:
    def output(self, shards):
        y = None
        for stage, of_stage in zip(self.layer.schedule.stages, shards, strict=True):
            weight = take_heads(self.proj.o, stage.q_heads[0], self.layer.head_dim, dim=1)
            part = F.linear(of_stage.segments()[0].flatten(2), weight)
            y = part if y is None else y + part
        return y

    return mock.patch.object(rank_pass.RankPass, "output", output)


def input_gradient_added_once_a_stage() -> Any:
    through_input = rank_pass.Gradients.through_input

    def by_stage(self, dq_shards, dkv_shards, write):
        rank, everything = self.rank, slice(0, self.rank.tokens)
        dx = torch.zeros_like(rank.x)
        for stage, of_stage in zip(rank.layer.schedule.stages, dq_shards, strict=True):
            dx += dx_of(rank, "q", stage.q_heads[0], of_stage.segments()[0], everything)
        for shards, done in dkv_shards:
            both = shards.segments()[0].unflatten(2, (2, -1))
            for index, name in enumerate("kv"):
                dx += dx_of(rank, name, done[0], both[:, :, index], everything)
        assert dx.dtype == torch.bfloat16
        through_input(self, dq_shards, dkv_shards, None)
        write(everything, dx)

    return mock.patch.object(rank_pass.Gradients, "through_input", by_stage)


def dx_of(rank: RankPass, name: str, heads: Sequence[int], grad: Tensor, tokens: slice) -> Tensor:
    projection = rank.head_projection(name, heads)
    rows, _ = projection.backward(grad, rank.x, None if name == "v" else rank.rotation(tokens))
    return (rows @ projection.weight).view(rank.x.shape)


def compare_with_mutant(mutant: Callable[[], Any], case: Case) -> tuple[dict[str, float], ...]:
    inputs, wide = rounded(case, 1)
    truth = dense(case, wide)
    baseline, ours = (errors(case, truth, inputs, method) for method in ("ulysses", "upipe"))
    with mutant():
        return ours, baseline, errors(case, truth, inputs, "upipe")


@pytest.mark.parametrize(
    ("mutant", "model", "quantities"),
    [
        (kv_gradients_summed_in_bf16, "one_kv_head", ("k", "v")),
        (output_projected_once_a_stage, "llama3_8b", ("y",)),
        (input_gradient_added_once_a_stage, "qwen3_32b", ("x",)),
    ],
)
def test_sums_over_stages_in_bf16_exceed_the_budget(mutant, model, quantities):
    ours, baseline, spoiled = run_ranks(compare_with_mutant, 1, mutant, case_of(model, 1, 1))[0]
    hold_to_budget(ours, baseline)
    for name, error in spoiled.items():
        if name in quantities:
            with pytest.raises(AssertionError, match=f"^{name}: error"):
                assert_within_budget(error, baseline[name], name, factor=FACTOR)
        elif name != "x":  # which also feels the errors of k and v
            assert error == ours[name], f"the mutant reached {name} too"
