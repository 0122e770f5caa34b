"""The training step: what it traces, what it refuses, and that every experiment's step can be built."""

from __future__ import annotations

import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paper_configs
from experiments.cli import compose
from experiments.config import Config, HardwareConfig, TrainConfig
from experiments.model import Decoder
from experiments.step import NonFiniteError, build_mesh, build_step
from tests.experiments.runs import Run, make_config
from upipe import memory
from upipe.testing import run_ranks

CONFIGS = Path(next(iter(paper_configs.__path__)))


def shards(run: Run) -> list[torch.Tensor]:
    return [weight.to_local().detach() for weight in run.step.optimizer.param_groups[0]["params"]]


# Traces


def traced_and_plain() -> tuple[Any, Any, memory.Timeline, int]:
    plain, traced = Run.start(make_config()), Run.start(make_config())
    results = [plain.step(plain.micro_batches()) for _ in range(2)]
    traced.step(traced.micro_batches())
    batches, found = traced.micro_batches(), []
    timeline = memory.trace(
        lambda: found.append(traced.step(batches)), owners={"parameter": traced.step.decoder.parameters()}
    )
    stored = sum(weight.untyped_storage().nbytes() for weight in shards(traced))
    return results[1], found[0], timeline, stored


def test_a_traced_step_is_the_same_step_and_its_parameters_are_found() -> None:
    for plain, traced, timeline, stored in run_ranks(traced_and_plain, 2):
        assert traced == plain
        assert sum(block.num_bytes for block in timeline.baseline if block.owner == "parameter") == stored
        assert timeline.at_peak["parameter"] == stored
        assert timeline.peak_bytes == sum(timeline.at_peak.values())
        assert timeline.peak_bytes > 4 * stored


# Values that are not finite


def poisoned(where: str) -> tuple[str, bool, float]:
    """Spoil rank 1 in the second step: its loss, its gradient, or a weight it holds."""
    run = Run.start(make_config())
    run.train(1)
    before = [weight.clone() for weight in shards(run)]
    forward = Decoder.forward

    def spoiled(self: Decoder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = forward(self, batch)
        if dist.get_rank() == 1:
            if where == "loss":
                return loss * math.inf
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss

    if where == "weight" and dist.get_rank() == 1:
        shards(run)[3][0] = math.nan
    check = run.step.check_weights if where == "weight" else lambda: run.train(1)
    with mock.patch.object(Decoder, "forward", spoiled), pytest.raises(NonFiniteError) as error:
        check()
    same = all(torch.equal(a, b) for a, b in zip(before, shards(run), strict=True))
    return str(error.value), same, run.step.steps


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("loss", "the loss of rank 1 is inf"),
        ("gradient", "the gradient norm over all ranks is nan"),
        ("weight", "a weight of rank 1 is nan"),
    ],
)
def test_values_that_are_not_finite_are_named_and_nothing_is_updated(where: str, message: str) -> None:
    for found, same, steps in run_ranks(poisoned, 2, where):
        assert found == message
        assert steps == 1
        assert same or where == "weight"


# Refusals, on every rank alike


def refusal(config: Config) -> str:
    with pytest.raises(ValueError) as error:
        build_step(config, build_mesh(config))
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (make_config(context=3), r"train\.context=3 must divide the 4 ranks; choose one of \[1, 2, 4\]"),
        (make_config("local", context=2), "method=local attends on one rank; train.context=2 must be 1"),
        (make_config(heads_per_stage=2), "heads_per_stage=2 must be .*; valid for 4 heads: 4$"),
        (make_config("ulysses", context=2, heads_per_stage=2), "heads_per_stage=2 has no effect"),
        (
            replace(make_config(), method=replace(make_config().method, kernel="flash")),
            "kernel='flash' cannot do this: it needs .*; choose auto or sdpa, blocked, reference$",
        ),
        (
            replace(make_config(documents=True), method=replace(make_config().method, kernel="sdpa")),
            "kernel='sdpa' cannot do this: .*; choose auto or blocked, reference$",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_the_first_step(config: Config, message: str) -> None:
    found = run_ranks(refusal, 4, config)
    assert len(set(found)) == 1
    assert re.search(message, found[0]), found[0]


# Schedule and weights


def rates_and_weights() -> tuple[list[float], int, int, bool]:
    run = Run.start(make_config(steps=8, warmup_steps=2, final_lr_fraction=0.1, tied_head=True))
    rates = [run.step(run.micro_batches()).lr for _ in range(8)]
    decoder = run.step.decoder
    held_out = run.held_out_nll()
    assert held_out == run.held_out_nll()
    gathered = [p for p in decoder.parameters() if not hasattr(p, "to_local")]
    return (
        rates,
        len(gathered),
        len(list(decoder.parameters())),
        decoder.lm_head.weight is decoder.model.embed_tokens.weight,
    )


def test_learning_rate_warms_up_and_falls_and_the_tied_head_stays_tied() -> None:
    lr = make_config().train.lr
    for rates, gathered, parameters, tied in run_ranks(rates_and_weights, 2):
        assert rates[:3] == pytest.approx([lr / 2, lr, lr])
        assert rates[-1] > 0.1 * lr
        assert all(later < earlier for earlier, later in itertools.pairwise(rates[2:]))
        assert gathered == 0, "weights stay gathered after an evaluation"
        assert parameters == 2 + 2 * 9
        assert tied


# Every experiment


def composed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    config = compose("train")
    assert isinstance(config, Config)
    return config


def command_of(experiment: Path) -> str:
    """Return the module that the first comment of an experiment's file runs it with."""
    found = re.search(rf"-m (\S+) .*experiment={experiment.stem}", experiment.read_text())
    assert found, f"{experiment.name} does not say which command runs it"
    return found[1]


EXPERIMENTS = sorted((CONFIGS / "experiment").glob("*.yaml"))
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
HARDWARE = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))
TRAINED = [path.stem for path in EXPERIMENTS if command_of(path) == "experiments.train"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(pytest.param([f"experiment={name}"], id=name) for name in TRAINED),
        *(pytest.param([f"model={name}", "method=ulysses"], id=name) for name in MODELS),
        *(pytest.param([f"hardware={name}", "model.tied_head=false"], id=name) for name in HARDWARE),
    ],
)
def test_every_config_builds_its_step_under_fake_tensors(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(monkeypatch, *arguments)
    config = replace(config, hardware=replace(config.hardware, device="cpu"))
    with memory.fake_ranks(8):
        step = build_step(config, build_mesh(config))
        weights = list(step.decoder.parameters())
        model = config.model
        attention = 2 * model.hidden_size * model.head_size * (model.heads + model.kv_heads)
        block = attention + 3 * model.hidden_size * model.ffn + 2 * model.hidden_size
        outer = (1 if model.tied_head else 2) * model.vocab * model.hidden_size + model.hidden_size
        assert sum(weight.numel() for weight in weights) == model.layers * block + outer
        # Sharded evenly over 8; nobody holds more.
        assert sum(weight.to_local().numel() for weight in weights) == (model.layers * block + outer) // 8


def test_the_defaults_of_the_schema_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(monkeypatch)
    assert config.train == TrainConfig()
    assert config.hardware == HardwareConfig()
    assert config == Config(config.model, config.method)
