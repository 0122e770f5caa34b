"""Training gives the same losses however the sequence, the batch and the heads are spread, and mutants do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from experiments import step as step_module
from experiments.config import Config
from tests.experiments.runs import Run, make_config
from upipe import shard_batch
from upipe.testing import run_ranks

STEPS = 30
# In fp64 runs differ by the order of additions alone.
TOLERANCE = 1e-9

Found = tuple[list[tuple[float, float]], float]


def run(config: Config, steps: int, mutant: str | None = None) -> Found:
    """Train in a rank: NLL and gradient norm by step, then the held-out NLL."""
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        training = Run.start(config)
        return training.train(steps), training.held_out_nll()


def assert_same(found: Found, truth: Found) -> None:
    for step, (ours, theirs) in enumerate(zip(found[0], truth[0], strict=True), start=1):
        assert ours == pytest.approx(theirs, rel=TOLERANCE), f"step {step}"
    assert found[1] == pytest.approx(truth[1], rel=TOLERANCE), "held-out"


@pytest.fixture(scope="module")
def truth() -> Found:
    """One process, plain attention, the whole batch at once."""
    return run_ranks(run, 1, make_config("local"), STEPS)[0]


@pytest.fixture(scope="module")
def documents_truth() -> Found:
    return run_ranks(run, 1, make_config("local", documents=True, accumulation=6), STEPS)[0]


def test_the_run_learns(truth: Found, documents_truth: Found) -> None:
    """Losses that stand still would agree too."""
    for (losses, held_out), other in ((truth, documents_truth), (documents_truth, truth)):
        assert losses[-1][0] < 0.75 * losses[0][0]
        assert held_out < 0.9 * losses[0][0]
        assert max(norm for _, norm in losses) > 1, "clipping has to bite"
        assert abs(losses[0][0] - other[0][0][0]) > 1e-4, "documents must matter"


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        pytest.param(1, make_config("local", accumulation=3), id="local, accumulation 3"),
        pytest.param(2, make_config("local", accumulation=3), id="local, 2 data, accumulation 3"),
        pytest.param(2, make_config("ulysses"), id="ulysses, 2 context"),
        pytest.param(2, make_config("upipe", accumulation=3), id="upipe, 2 context, accumulation 3"),
        pytest.param(2, make_config("upipe", heads_per_stage=4), id="upipe, 2 context, U = H"),
        pytest.param(4, make_config("ulysses", accumulation=3), id="ulysses, 4 context, accumulation 3"),
        pytest.param(4, make_config("upipe"), id="upipe, 4 context"),
        pytest.param(4, make_config("ulysses", context=2), id="ulysses, 2 data x 2 context"),
        pytest.param(4, make_config("upipe", context=2, accumulation=3), id="upipe, 2 x 2, accumulation 3"),
    ],
)
def test_losses_are_those_of_one_process(ranks: int, config: Config, truth: Found) -> None:
    for found in run_ranks(run, ranks, config, STEPS):
        assert_same(found, truth)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        pytest.param(2, make_config("upipe", documents=True, accumulation=6), id="upipe, 2 context"),
        pytest.param(4, make_config("ulysses", documents=True, context=2, accumulation=3), id="ulysses, 2 x 2"),
        pytest.param(4, make_config("upipe", documents=True, context=2, accumulation=3), id="upipe, 2 x 2"),
    ],
)
def test_losses_of_documents(ranks: int, config: Config, documents_truth: Found) -> None:
    for found in run_ranks(run, ranks, config, STEPS):
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
        own = shard_batch({**{k: v for k, v in batch.items() if k != "labels"}, "shift_labels": batch["labels"]}, group=group)
        own["labels"] = torch.nn.functional.pad(own["labels"][:, 1:], (0, 1), value=-100)
        return own

    with mock.patch.object(step_module, "shard_batch", wrong):
        yield


@contextlib.contextmanager
def gradients_averaged() -> Iterator[None]:
    with mock.patch.object(step_module, "sum_gradients", lambda model: None):
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
    found = run_ranks(run, 2, config, 2, mutant)[0]
    with pytest.raises(AssertionError):
        assert_same(found, (truth[0][:2], truth[1]))
    if mutant != "tokens_counted_by_micro_batch":
        return
