"""Runs on several ranks: killed and continued, on other ranks, started wrongly."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.records import RecordFile
from tests.experiments.commands import ROOT, Commands, Finished, Started, wait_until

pytestmark = pytest.mark.slow  # whole commands in processes of their own

TRAIN = "experiments.train"


def run(commands: Commands, ranks: int, *arguments: str) -> list[Finished]:
    found = [started.wait() for started in commands.ranks(TRAIN, *[arguments] * ranks)]
    assert [(each.code, each.err) for each in found] == [(0, "")] * ranks
    return found


def losses(out: Path) -> list[tuple[object, object, object, object]]:
    """Return the records' steps and losses as they lie in the file."""
    return [
        (record.get("step"), record.get("split"), record.value, record.extra.get("grad_norm", 0.0))
        for record in RecordFile(out / "records.jsonl").read()
    ]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(commands: Commands, small: list[str]) -> Path:
    """A run of 12 steps on 2 ranks that nobody disturbed, with all its checkpoints."""
    out = commands.folder / "whole"
    finished = run(commands, 2, *small, "data.batch_size=2", "train.keep_checkpoints=9", f"out={out}")
    assert finished[1].out == "", "one rank prints"
    return out


def test_an_undisturbed_run_records_every_step_once(whole: Path) -> None:
    found = losses(whole)
    assert [step for step, split, *_ in found if split == "train"] == list(range(1, 13))
    assert [step for step, split, *_ in found if split == "held_out"] == [4, 8, 12]
    assert checkpoints(whole) == [f"step_{step:08d}" for step in (3, 6, 9, 12)]


# Killed


def kill(started: Sequence[Started], ranks: Sequence[int]) -> None:
    for rank in ranks:
        started[rank].signal(signal.SIGKILL)
    for rank, each in enumerate(started):
        # A rank that lost another must not wait for it.
        assert each.wait().code == -signal.SIGKILL if rank in ranks else each.wait().code != 0


def test_a_run_killed_again_and_again_equals_the_undisturbed_one(
    commands: Commands, small: list[str], whole: Path, tmp_path: Path
) -> None:
    arguments = [*small, "data.batch_size=2", "train.keep_checkpoints=2", f"out={tmp_path}"]
    records = tmp_path / "records.jsonl"
    chance = random.Random(0)
    partial = tmp_path / "checkpoints"
    ends = [
        lambda started: re.search(r"\n {5}2 ", started[0].out),  # before the first checkpoint
        lambda started: list(partial.glob(".partial_*")),  # in the middle of one
        lambda started: re.search(r"\n {5}[5-9] ", started[0].out),
        lambda started: list(partial.glob("step_00000006")),
    ]
    for happened in ends:
        started = commands.ranks(TRAIN, arguments, arguments)
        wait_until(lambda started=started, happened=happened: happened(started))
        kill(started, chance.choice([[0], [1], [0, 1]]))
    # What a kill leaves where these did not.
    with records.open("ab") as file:
        file.write(records.read_bytes()[:100])
    leftover = partial / ".partial_step_00000006"
    leftover.mkdir(exist_ok=True)
    (leftover / "__0_0.distcp").write_bytes(b"half")
    (continued, _) = run(commands, 2, *arguments)
    assert re.search(r", from step (3|6|9)\n", continued.out)
    assert losses(tmp_path) == losses(whole)
    assert checkpoints(tmp_path) == ["step_00000009", "step_00000012"]
    assert not (tmp_path / "records.jsonl.tmp").exists()


# Continued by others


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, ["method=local"]),
        (3, []),
        (4, ["method=ulysses", "train.context=2"]),
        (2, ["train.accumulation=2", "method.heads_per_stage=4"]),
    ],
)
def test_other_ranks_and_methods_continue_a_run(
    commands: Commands, small: list[str], whole: Path, tmp_path: Path, ranks: int, arguments: list[str]
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    for name in ("step_00000009", "step_00000012"):
        shutil.rmtree(out / "checkpoints" / name)
    (leader, *_) = run(commands, ranks, *small, "data.batch_size=2", f"out={out}", *arguments)
    assert ", from step 6\n" in leader.out
    for found, truth in zip(losses(out), losses(whole), strict=True):
        assert found[:2] == truth[:2]
        assert found[2:] == pytest.approx(truth[2:], rel=1e-10)
    assert losses(out) != losses(whole) or ranks == 2, "nothing was computed again"


def test_a_checkpoint_that_lost_weights_is_noticed(
    whole: Path, small: list[str], commands: Commands, tmp_path: Path
) -> None:
    """The comparison above can fail: with other weights at step 6 the losses differ."""
    out = shutil.copytree(whole, tmp_path / "out")
    for step in (9, 12):
        shutil.rmtree(out / "checkpoints" / f"step_{step:08d}")
    replaced, source = (out / "checkpoints" / f"step_{step:08d}" for step in (6, 3))
    for file in source.glob("*.distcp"):
        shutil.copy(file, replaced)
    shutil.copy(source / ".metadata", replaced)
    run(commands, 1, *small, "data.batch_size=2", "method=local", f"out={out}")
    differs = [
        found[0]
        for found, truth in zip(losses(out), losses(whole), strict=True)
        if found[2] != pytest.approx(truth[2], rel=1e-6)
    ]
    assert min(differs) == 7


# Started wrongly


def refused(started: Sequence[Started], message: str) -> None:
    found = [each.wait(timeout_s=20) for each in started]
    assert [each.code for each in found] == [2] * len(found), found
    assert re.fullmatch(f"error: {message}\n", found[0].err), found[0].err
    assert {each.err for each in found[1:]} == {""}


def test_ranks_with_different_configs_end_together(commands: Commands, small: list[str], tmp_path: Path) -> None:
    ours = [*small, f"out={tmp_path}"]
    started = commands.ranks(TRAIN, ours, [*ours, "train.lr=1e-4", "method=ulysses"])
    refused(
        started,
        r"ranks were started with different configs: method\.name=upipe on rank 0 and ulysses on rank 1, "
        r"train\.lr=0\.001 on rank 0 and 0\.0001 on rank 1; start all with the same command",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_rank_with_a_mistake_ends_all(commands: Commands, small: list[str], tmp_path: Path, wrong: int) -> None:
    arguments = [[*small, f"out={tmp_path}"] for _ in range(2)]
    arguments[wrong].append("train.steps=0")
    refused(commands.ranks(TRAIN, *arguments), rf"rank {wrong}: train\.steps=0 must be at least 1")


def test_a_file_that_one_rank_lacks_ends_all(commands: Commands, small: list[str], tmp_path: Path, text: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    shutil.copy(text, here)
    arguments = [*small, "data.source=text.txt"]
    refused(
        commands.ranks(TRAIN, arguments, arguments, folders=[here, there]),
        r"rank 1: text\.txt: no such file or folder; .*",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.context=4"], r"train\.context=4 must divide the 2 ranks; choose one of \[1, 2\]"),
        (["method=local", "train.context=2"], r"method=local attends on one rank; train\.context=2 must be 1, .*"),
        (["method.heads_per_stage=3"], r"heads_per_stage=3 must be .*; valid for 4 heads: 2, 4"),
        (["train.context=1"], r"batch_size=1 must be a multiple of num_shards=2 \(data-parallel ranks\); .*"),
    ],
)
def test_a_mistake_that_depends_on_the_ranks(
    commands: Commands, small: list[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    same = [*small, f"out={tmp_path}", *arguments]
    refused(commands.ranks(TRAIN, same, same), message)


def test_interrupted_ranks_end_quietly(commands: Commands, small: list[str], tmp_path: Path) -> None:
    arguments = [*small, "train.steps=400", f"out={tmp_path}"]
    started = commands.ranks(TRAIN, arguments, arguments)
    wait_until(lambda: "\n     5 " in started[0].out)
    for each in started:
        each.signal(signal.SIGINT)
    found = [each.wait() for each in started]
    assert [each.code for each in found] == [130, 130]
    assert found[0].err == "interrupted; the same command continues from the last checkpoint\n"
    assert found[1].err == ""


# Under torchrun itself


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "--max-restarts", "0", "-m", TRAIN, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_loses_a_rank_and_the_same_command_continues(small: list[str], whole: Path, tmp_path: Path) -> None:
    arguments = [*small, "data.batch_size=2", f"out={tmp_path}"]
    killed = torchrun(*arguments)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("     5 "):
            break
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    subprocess.run(["kill", "-9", children[-1]], check=True)
    killed.communicate(timeout=60)
    assert killed.returncode != 0
    continued = torchrun(*arguments)
    out, err = continued.communicate(timeout=60)
    assert continued.returncode == 0, err
    assert ", from step 3\n" in out or ", from step 6\n" in out
    assert "Traceback" not in err
    assert losses(tmp_path) == losses(whole)


def test_torchrun_prints_a_mistake_once(small: list[str], tmp_path: Path) -> None:
    started = torchrun(*small, "method.heads_per_stage=3", f"out={tmp_path}")
    _, err = started.communicate(timeout=60)
    assert started.returncode != 0
    assert err.count("error: heads_per_stage=3 must be") == 1
    assert set(re.findall(r"exitcode *: (\d+)", err)) == {"2"}
    assert "experiments/train.py" not in err, "a traceback of ours"
