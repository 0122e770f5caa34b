"""Checkpoints: what comes back is what was saved, on any number of ranks, and nothing is ever half there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from experiments.checkpoint import RUN_FILE, Checkpoints
from experiments.config import Config
from tests.experiments.runs import Run, make_config
from upipe.testing import run_ranks

STEPS = 3


def whole_state(run: Run) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state by name, gathered."""
    model, optimizer = get_state_dict(run.step.decoder, run.step.optimizer)
    moments = {f"{name} {key}": value for name, state in optimizer["state"].items() for key, value in state.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in [*model.items(), *moments.items()]
    }


def save(config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Train, save, and train on."""
    run = Run.start(config)
    run.train(STEPS)
    Checkpoints(config, folder).save(STEPS, run.step, run.loader.state_dict())
    return whole_state(run), run.train(2)


def load(config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]], int]:
    """Train something else, so that nothing is right by chance, and load."""
    run = Run.start(config)
    run.train(1)
    checkpoints = Checkpoints(config, folder)
    latest = checkpoints.latest()
    assert latest is not None
    state = checkpoints.read_run(latest)
    checkpoints.load(latest, run.step, state)
    run.loader.load_state_dict(state["loader"])
    return whole_state(run), run.train(2), run.step.steps


@pytest.mark.parametrize("tied", [False, True])
def test_weights_moments_and_place_come_back_on_other_ranks(tmp_path: Path, tied: bool) -> None:
    saved, after = run_ranks(save, 2, make_config("upipe", tied_head=tied), tmp_path)[0]
    for ranks, config in [
        (2, make_config("upipe", tied_head=tied)),
        (1, make_config("local", tied_head=tied)),
        (3, make_config("ulysses", tied_head=tied)),
    ]:
        loaded, continued, steps = run_ranks(load, ranks, config, tmp_path)[0]
        assert steps == STEPS + 2
        assert loaded.keys() == saved.keys()
        assert any(name.endswith("exp_avg_sq") for name in saved)
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name
        if ranks == 2:
            assert continued == after
        else:
            for ours, theirs in zip(continued, after, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10)


def test_the_tied_head_is_saved_once(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        saved, _ = run_ranks(save, 2, make_config("upipe", tied_head=tied), folder)[0]
        names = FileSystemReader(folder / f"step_{STEPS:08d}").read_metadata().state_dict_metadata
        assert "model.model.embed_tokens.weight" in names
        assert ("model.lm_head.weight" in names) == (not tied)
        assert torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"]) == tied


def continue_in_float32(folder: Path) -> list[tuple[float, float]]:
    config = make_config("upipe", dtype="float32")
    run = Run.start(config)
    checkpoints = Checkpoints(config, folder)
    (latest,) = checkpoints.newest_first()
    checkpoints.load(latest, run.step, checkpoints.read_run(latest))
    run.loader.load_state_dict(checkpoints.read_run(latest)["loader"])
    assert next(run.step.decoder.parameters()).dtype == torch.float32
    return run.train(2)


def test_another_precision_continues(tmp_path: Path) -> None:
    _, after = run_ranks(save, 2, make_config("upipe"), tmp_path)[0]
    for ours, theirs in zip(run_ranks(continue_in_float32, 2, tmp_path)[0], after, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def options(folder: Path) -> list[dict[str, Any]]:
    """Continue with other options, and return what the optimizer used."""
    config = make_config("upipe", lr=0.5, weight_decay=0.25, beta2=0.5, warmup_steps=0)
    run = Run.start(config)
    checkpoints = Checkpoints(config, folder)
    (latest,) = checkpoints.newest_first()
    checkpoints.load(latest, run.step, checkpoints.read_run(latest))
    result = run.step(run.micro_batches())
    return [{"result": result.lr, **group, "params": None} for group in run.step.optimizer.param_groups]


def test_options_of_the_optimizer_are_those_of_this_run(tmp_path: Path) -> None:
    run_ranks(save, 2, make_config("upipe"), tmp_path)
    for (group,) in run_ranks(options, 2, tmp_path):
        assert 0.45 < group["lr"] < 0.5
        assert group["lr"] == group["result"]
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.5), 0.25)


def interrupted(folder: Path) -> list[str]:
    config = make_config("upipe")
    run = Run.start(config)
    checkpoints = Checkpoints(config, folder)
    checkpoints.save(1, run.step, run.loader.state_dict())
    with (
        mock.patch.object(FileSystemWriter, "write_data", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoints.save(2, run.step, run.loader.state_dict())
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.name == "step_00000001"
    left = sorted(path.name for path in folder.iterdir())
    checkpoints.save(2, run.step, run.loader.state_dict())
    return [*left, *sorted(path.name for path in folder.iterdir())]


def test_ctrl_c_while_saving_is_ctrl_c_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    (left,) = run_ranks(interrupted, 1, tmp_path)
    assert left == [".partial_step_00000002", "step_00000001", "step_00000001", "step_00000002"]


def pruned(folder: Path) -> list[list[str]]:
    config = make_config("upipe", keep_checkpoints=2)
    run = Run.start(config)
    checkpoints = Checkpoints(config, folder)
    found = []
    for step in (1, 2, 3, 10):
        checkpoints.save(step, run.step, run.loader.state_dict())
        found.append(sorted(path.name for path in folder.iterdir()))
    return found


def test_the_newest_are_kept(tmp_path: Path) -> None:
    one, two, three, ten = (f"step_{step:08d}" for step in (1, 2, 3, 10))
    assert run_ranks(pruned, 1, tmp_path)[0] == [[one], [one, two], [two, three], [three, ten]]


def test_a_checkpoint_without_its_last_file_does_not_exist(tmp_path: Path) -> None:
    checkpoints = Checkpoints(make_config(), tmp_path)
    assert checkpoints.latest() is None
    for step in (5, 6):
        (tmp_path / f"step_{step:08d}").mkdir()
    (tmp_path / "step_00000005" / RUN_FILE).write_text("{}")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.name == "step_00000005"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, r"model\.hidden_size=32 there and 64 here"),
        ({"seed": 7}, r"train\.seed=0 there and 7 here"),
        ({"sequence_length": 62, "shuffle": False}, r"sequence_length=61 there and 62 here, data\.shuffle=True there"),
        ({"token_dtype": "int32"}, r"data\.token_dtype=None there and int32 here"),
    ],
)
def test_what_a_checkpoint_is_bound_to(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first = Checkpoints(make_config("upipe"), tmp_path)
    (tmp_path / RUN_FILE).write_text(json.dumps({"config": first.bound}))
    for config in (make_config("local", steps=99, accumulation=3), make_config("ulysses", context=1)):
        Checkpoints(config, tmp_path).read_run(tmp_path)
    with pytest.raises(ValueError, match=message):
        Checkpoints(make_config(**change), tmp_path).read_run(tmp_path)
