"""Training gives the same losses however the sequence, the batch and the heads are spread, and mutants do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from experiments import step as step_module
from experiments.config import Config
from tests.experiments.runs import Run, make_config
from upipe import shard_batch
from upipe.testing import run_ranks

LONG, SHORT = 30, 6
# In fp64 runs differ by the order of additions alone.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Found:
    """NLL and gradient norm by step, and the held-out NLL after 1, SHORT and LONG steps."""

    steps: list[tuple[float, float]]
    held_out: dict[int, float]


def run(config: Config, steps: int, mutant: str | None = None) -> Found:
    """Train in a rank."""
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        training = Run.start(config)
        found = Found([], {})
        for end in (1, SHORT, LONG):
            if end <= steps:
                found.steps.extend(training.train(end - len(found.steps)))
                found.held_out[end] = training.held_out_nll()
        return found


def assert_same(found: Found, truth: Found) -> None:
    for step, (ours, theirs) in enumerate(zip(found.steps, truth.steps, strict=False), start=1):
        assert ours == pytest.approx(theirs, rel=TOLERANCE), f"step {step}"
    for step, nll in found.held_out.items():
        assert nll == pytest.approx(truth.held_out[step], rel=TOLERANCE), f"held-out, step {step}"


@pytest.fixture(scope="module")
def truth() -> Found:
    """One process, plain attention, the whole batch at once."""
    return run_ranks(run, 1, make_config("local"), LONG)[0]


@pytest.fixture(scope="module")
def documents_truth() -> Found:
    return run_ranks(run, 1, make_config("local", documents=True, batch_size=2, accumulation=2), LONG)[0]


def test_the_runs_learn(truth: Found, documents_truth: Found) -> None:
    """Losses that stand still would agree too."""
    for found in (truth, documents_truth):
        first, last = found.steps[0][0], found.steps[-1][0]
        assert last < 0.75 * first
        assert found.held_out[LONG] < 0.75 * first
        assert max(norm for _, norm in found.steps) > make_config().train.clip


@pytest.mark.parametrize(
    ("steps", "ranks", "config"),
    [
        pytest.param(LONG, 1, make_config("local", accumulation=3), id="local, accumulation 3"),
        pytest.param(SHORT, 2, make_config("local", accumulation=3), id="local, 2 data, accumulation 3"),
        pytest.param(LONG, 2, make_config("ulysses"), id="ulysses, 2 context"),
        pytest.param(LONG, 2, make_config("upipe", accumulation=3), id="upipe, 2 context, accumulation 3"),
        pytest.param(SHORT, 2, make_config("upipe", heads_per_stage=4), id="upipe, 2 context, U = H"),
        pytest.param(SHORT, 4, make_config("ulysses", accumulation=3), id="ulysses, 4 context, accumulation 3"),
        pytest.param(LONG, 4, make_config("upipe"), id="upipe, 4 context"),
        pytest.param(SHORT, 4, make_config("ulysses", context=2), id="ulysses, 2 data x 2 context"),
        pytest.param(SHORT, 4, make_config("upipe", context=2, accumulation=3), id="upipe, 2 x 2, accumulation 3"),
    ],
)
def test_losses_are_those_of_one_process(steps: int, ranks: int, config: Config, truth: Found) -> None:
    for found in run_ranks(run, ranks, config, steps):
        assert len(found.steps) == steps
        assert_same(found, truth)


@pytest.mark.parametrize(
    ("steps", "ranks", "config"),
    [
        pytest.param(SHORT, 2, make_config("ulysses", documents=True, batch_size=2, accumulation=2), id="ulysses, 2"),
        pytest.param(LONG, 2, make_config("upipe", documents=True, batch_size=2, accumulation=2), id="upipe, 2"),
        pytest.param(SHORT, 4, make_config("upipe", documents=True, batch_size=2, context=2), id="upipe, 2 x 2"),
    ],
)
def test_losses_of_documents(steps: int, ranks: int, config: Config, documents_truth: Found) -> None:
    for found in run_ranks(run, ranks, config, steps):
        assert_same(found, documents_truth)


# What others ship, put into our step.


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    def wrong(loss_sum, valid_tokens, group):
        return loss_sum / max(int(valid_tokens), 1) / group.size()

    with mock.patch.object(step_module, "context_parallel_loss", wrong):
        yield


@contextlib.contextmanager
def labels_shifted_after_sharding() -> Iterator[None]:
    def wrong(batch, *, group):
        own = shard_batch(
            {**{k: v for k, v in batch.items() if k != "labels"}, "shift_labels": batch["labels"]}, group=group
        )
        own["labels"] = torch.nn.functional.pad(own["labels"][:, 1:], (0, 1), value=-100)
        return own

    with mock.patch.object(step_module, "shard_batch", wrong):
        yield


@contextlib.contextmanager
def gradients_averaged() -> Iterator[None]:
    with mock.patch.object(step_module, "sum_gradients"):
        yield


@contextlib.contextmanager
def gradients_summed_at_the_root_alone() -> Iterator[None]:
    def wrong(model):
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)

    with mock.patch.object(step_module, "sum_gradients", wrong):
        yield


@contextlib.contextmanager
def tokens_counted_by_micro_batch() -> Iterator[None]:
    right = step_module.context_parallel_loss

    def wrong(loss_sum, valid_tokens, group):
        return right(loss_sum, valid_tokens // 3, group) / 3

    with mock.patch.object(step_module, "context_parallel_loss", wrong):
        yield


@contextlib.contextmanager
def loss_of_this_rank_logged() -> Iterator[None]:
    """A rank that logs its own share, as if every rank had the same."""

    def wrong(self, share, name=""):
        return float(share) * dist.get_world_size()

    with mock.patch.object(step_module.TrainingStep, "_sum_over_ranks", wrong):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function
    for function in (
        mean_of_means,
        labels_shifted_after_sharding,
        gradients_averaged,
        gradients_summed_at_the_root_alone,
        tokens_counted_by_micro_batch,
        loss_of_this_rank_logged,
    )
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant: str, truth: Found) -> None:
    config = make_config("upipe", accumulation=3)
    (found, _) = run_ranks(run, 2, config, 1, mutant)
    with pytest.raises(AssertionError, match=r"^step 1\n"):
        assert_same(found, truth)


def test_mutant_that_sees_no_documents_is_caught(documents_truth: Found) -> None:
    config = make_config("upipe", documents=True, batch_size=2, accumulation=2)
    (found, _) = run_ranks(run, 2, replace(config, data=replace(config.data, documents=False)), 1)
    with pytest.raises(AssertionError, match=r"^step 1\n"):
        assert_same(found, documents_truth)
