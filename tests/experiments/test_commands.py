"""The commands as a user meets them: help, mistakes, Ctrl-C."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paper_configs
from experiments.records import RecordFile
from tests.experiments.commands import ROOT, Commands, Finished, wait_until

pytestmark = pytest.mark.slow  # whole commands in processes of their own

TRAIN, CHUNKS = "experiments.train", "experiments.chunks"


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def assert_refused(finished: Finished, message: str) -> None:
    assert finished.err.startswith("error: "), finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert finished.err.endswith("\n")
    assert re.search(message, finished.err), finished.err
    assert finished.out == ""
    assert finished.code == 2


# Help


@pytest.mark.parametrize("module", [TRAIN, CHUNKS])
def test_help_lists_groups_keys_and_ways_to_call(commands: Commands, module: str) -> None:
    shown = commands(module, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert re.search(rf"^  (torchrun .*|python )-m {module}$", shown.out, flags=re.M)
    folder = Path(next(iter(paper_configs.__path__)))
    listed = "model: " if module == TRAIN else "Models: "
    assert listed + ", ".join(sorted(path.stem for path in (folder / "model").glob("*.yaml"))) in shown.out
    for line in commands(module, "--cfg", "job").out.splitlines():
        assert line in shown.out
    assert "hydra" not in shown.out.lower()
    assert "$" not in shown.out


@pytest.mark.parametrize("module", [TRAIN, CHUNKS])
def test_cfg_job_prints_the_values_of_this_call(commands: Commands, module: str) -> None:
    shown = commands(module, "--cfg", "job", "name=mine", "model=qwen3_32b")
    assert (shown.code, shown.err) == (0, "")
    assert "\nname: mine\n" in shown.out
    assert "  hidden_size: 5120\n" in shown.out
    assert "hydra" not in shown.out


# Mistakes of one process


@pytest.fixture(scope="module")
def finished(commands: Commands, small: list[str]) -> Path:
    """The folder of a run that is done."""
    out = commands.folder / "finished"
    assert commands(TRAIN, *small, f"out={out}").code == 0
    return out


@pytest.fixture(scope="module")
def files(commands: Commands) -> Path:
    folder = commands.folder / "files"
    folder.mkdir()
    np.save(folder / "beyond.npy", np.arange(1000, dtype=np.int32))
    np.save(folder / "float.npy", np.arange(1000.0))
    (folder / "cut_off.npy").write_bytes((folder / "beyond.npy").read_bytes()[:500])
    (folder / "cut_off.bin").write_bytes(b"abc" * 333)
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 500)
    return folder


CHECKPOINT = "the checkpoint .* is of another model or other data: "
MISTAKES = {
    "method.heads_per_stage=5": r"heads_per_stage=5 must be .*; valid for 4 heads: 1, 2, 3, 4$",
    "model.kv_heads=3": r"model\.heads=4 must be a multiple of model\.kv_heads=3$",
    "method=nothing": r"Could not find 'method/nothing' Available options in 'method': local ulysses upipe$",
    "model=nothing": r"Could not find 'model/nothing' Available options in 'model': .*tiny$",
    "train.nothing=1": r"train\.nothing: no such key; valid: train\.steps, ",
    "+train.nothing=1": r"train\.nothing: no such key; valid: train\.steps, ",
    "nothing=1": r"nothing: no such key; valid: model, method, ",
    "train=3": r"train=3 must be a group of keys",
    "train.steps=abc": r"train\.steps: Value 'abc' .* Integer$",
    "train.steps=[": r"no viable alternative",
    "train.steps": r"Error parsing override 'train\.steps'",
    "train.steps=0": r"train\.steps=0 must be at least 1$",
    "train.lr=nan": r"train\.lr=nan must be above 0$",
    "train.lr=inf": r"train\.lr=inf must be finite$",
    "train.beta2=1": r"train\.beta2=1\.0 must be below 1$",
    "train.weight_decay=nan": r"train\.weight_decay=nan must be at least 0$",
    "train.seed=4294967296": r"train\.seed=4294967296 must be below 4294967296$",
    "train.dtype=float16": r"train\.dtype=float16 is not known; choose float32, bfloat16, float64$",
    "train.context=2": r"train\.context=2 must divide the 1 ranks; choose one of \[1\]$",
    "train.accumulation=2": r"data\.batch_size=1 sequences must be a multiple of train\.accumulation=2$",
    "data.documents=true": r"documents=True needs document borders and .*text\.txt has none",
    "data.source=???": r"data\.source has no value; give one with data\.source=",
    "method.kernel=flash": r"kernel='flash' cannot do this: .*; choose auto or sdpa",
    "method.kernel=nothing": r"kernel='nothing' is not known; choose auto, ",
    "hardware=h100_8": r"hardware=h100_8 needs a CUDA device a rank and torch \S+ sees 0; use hardware=cpu$",
    "model.hidden_size=64": CHECKPOINT + r"model\.hidden_size=32 there and 64 here; use another out=DIR",
    "data.shuffle=false": CHECKPOINT + r"data\.shuffle=True there and False here",
    "out=": r"out must name the folder",
    "out=null": r"out: Incompatible value 'None'",
    "out=text.txt/below": r"out=text\.txt/below: cannot write text\.txt/below: Not a directory; choose another folder$",
}
MISTAKES_IN_DATA = {
    "data.source=files/beyond.npy": r"token ids go from 0 to 999, vocab_size=256 allows 0 to 255",
    "data.source=files/float.npy": r"must hold token ids as integers \[tokens\], got float64",
    "data.source=files/cut_off.npy": r"not a whole \.npy file",
    "data.source=files/cut_off.bin": r"a raw \.bin file needs one of uint8, ",
    "data.source=files/empty.txt": r"the file is empty",
    "data.source=files/latin.txt": r"not UTF-8 text",
    "data.source=files/missing.txt": r"no such file or folder",
    "data.sequence_length=9999": r"sequence_length=9999 needs 9999 tokens, the training part of .* has \d+; use at",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_lost(
    commands: Commands, small: list[str], finished: Path, argument: str
) -> None:
    before = contents(commands.folder)
    found = commands(TRAIN, *small, f"out={finished}", argument)
    assert_refused(found, MISTAKES[argument])
    after = contents(commands.folder)
    assert {path: after[path] for path in after if not path.startswith("command_outputs")} == {
        path: before[path] for path in before if not path.startswith("command_outputs")
    }


@pytest.mark.parametrize("argument", MISTAKES_IN_DATA)
def test_a_mistake_in_the_data_is_one_line_and_records_stay(
    commands: Commands, small: list[str], finished: Path, files: Path, argument: str, tmp_path: Path
) -> None:
    """Without a checkpoint, which would be of other data; the records are of a run that was interrupted before one."""
    shutil.copy(finished / "records.jsonl", tmp_path)
    before = contents(tmp_path)
    assert_refused(commands(TRAIN, *small, f"out={tmp_path}", argument), MISTAKES_IN_DATA[argument])
    assert contents(tmp_path) == before


def test_a_broken_line_in_the_records_is_named(
    commands: Commands, small: list[str], finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    lines = (out / "records.jsonl").read_text().splitlines(keepends=True)
    (out / "records.jsonl").write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
    before = contents(out)
    assert_refused(
        commands(TRAIN, *small, f"out={out}"), r"records\.jsonl:3: not a record: .* missing; remove the line"
    )
    assert contents(out) == before


def test_a_run_that_is_done_says_so_and_stays(commands: Commands, small: list[str], finished: Path) -> None:
    before = contents(finished)
    done = commands(TRAIN, *small, f"out={finished}")
    assert (done.code, done.err) == (0, "")
    assert "all 12 steps are done; a larger train.steps continues" in done.out
    assert contents(finished) == before


# Losses that are not finite


def test_divergence_names_step_and_checkpoints_and_the_good_one_continues(
    commands: Commands, small: list[str], finished: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    before = contents(out / "checkpoints" / "step_00000012")
    continued = [*small, "train.steps=15", "train.save_every=1", f"out={out}"]
    diverged = commands(TRAIN, *continued, "train.lr=1e200")
    assert diverged.code == 2
    assert diverged.err.count("\n") == 1
    named = re.search(
        r"^error: step 14: (the loss of rank 0|the gradient norm over all ranks) is (nan|inf); the last checkpoint "
        r"is (.*/step_00000013) \(no step after it was finite; remove it to continue from step_00000012\); lower train",
        diverged.err,
    )
    assert named, diverged.err
    assert contents(out / "checkpoints" / "step_00000012") == before
    shutil.rmtree(named[3])
    healed = commands(TRAIN, *continued)
    assert (healed.code, healed.err) == (0, "")
    records = RecordFile(out / "records.jsonl").read()
    steps = [record.get("step") for record in records if record.get("split") == "train"]
    assert steps == list(range(1, 16))
    # The learning rate is that of the last command, not that of a checkpoint.
    assert max(record.get("lr") for record in records if record.get("split") == "train") <= 1e-3


# Ctrl-C


def test_interrupted_training_ends_quietly_and_the_same_command_continues(
    commands: Commands, small: list[str], tmp_path: Path
) -> None:
    arguments = [*small, "train.steps=400", "train.save_every=5", "train.eval_every=0", f"out={tmp_path}"]
    # A process of its own: its interpreter, not a fork of ours, has to end well.
    process = subprocess.Popen(
        [sys.executable, "-m", TRAIN, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("    12 "):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err == "interrupted; the same command continues from the last checkpoint\n"
    assert process.returncode == 130
    done = len(RecordFile(tmp_path / "records.jsonl").read())
    assert 11 <= done < 400
    continued = commands.start(TRAIN, *arguments)
    wait_until(lambda: f"\n{done + 2:6d} " in continued.out)
    continued.signal(signal.SIGINT)
    again = continued.wait()
    assert again.code == 130
    assert f", from step {done // 5 * 5}\n" in again.out
    steps = [record.get("step") for record in RecordFile(tmp_path / "records.jsonl").read()]
    assert steps == list(range(1, len(steps) + 1))


# chunks


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("real.ranks=3", r"real\.tokens=64 must be a multiple of 3 ranks; use 66$"),
        ("real.heads_per_stage=[3]", r"heads_per_stage=3 must be .*; valid for 8 heads: 2, 4, 6, 8$"),
        ("traced.heads_per_stage=[9]", r"heads_per_stage=9 must be .*; valid for 8 heads: 2, 4, 6, 8$"),
        ("traced.kernel=nothing", r"traced\.kernel=nothing is not known; choose flash, "),
        ("traced.lengths=[63]", r"traced\.lengths=63 must be a multiple of 2 ranks; use 64$"),
        ("real.dtype=int8", r"real\.dtype=int8 is not known; choose float32, "),
        ("real.tokens=abc", r"real\.tokens: Value 'abc'"),
        ("method=upipe", r"method: no such key; valid: model, real, traced, out, name$"),
        ("real.nothing=1", r"real\.nothing: no such key; valid: real\.ranks, "),
        ("model=nothing", r"Available options in 'model': llama3_8b qwen3_32b tiny$"),
        ("out=text.txt/below", r"cannot write text\.txt/below: Not a directory"),
    ],
)
def test_a_mistake_in_chunks_is_one_line(
    commands: Commands, text: Path, tmp_path: Path, argument: str, message: str
) -> None:
    (tmp_path / "records.jsonl").write_text("kept\n")
    (tmp_path / "cells.jsonl").write_text("kept\n")
    assert_refused(commands(CHUNKS, *SMALL_CHUNKS, f"out={tmp_path}", argument), message)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept\n"}


SMALL_CHUNKS = [
    # One KV head on two ranks keeps DeepSpeed out, whose import takes longer than all else.
    *("model=tiny", "model.kv_heads=1", "real.ranks=2", "real.tokens=64", "real.hidden_size=32", "real.pairs=3"),
    *("real.pairs_per_start=1", "traced.ranks=2", "traced.lengths=[64, 128]"),
]
RECORD_KEYS = {
    *("experiment", "method", "model", "hardware", "length_tokens", "quantity", "value", "unit", "published"),
    *("commit", "versions", "variant", "ranks"),
}


def test_interrupted_chunks_continue_and_record_what_they_found(commands: Commands, tmp_path: Path) -> None:
    cells = tmp_path / "cells.jsonl"
    interrupted = commands.start(CHUNKS, *SMALL_CHUNKS, f"out={tmp_path}")
    wait_until(lambda: cells.exists() and cells.read_text().count("\n") >= 2)
    interrupted.signal(signal.SIGINT)
    left = interrupted.wait()
    assert left.err == "interrupted; the same command continues with what is left\n"
    assert left.code == 130
    kept = cells.read_text().splitlines()
    assert 2 <= len(kept) < 14
    with cells.open("a") as file:
        file.write(kept[0][:30])  # torn by a kill
    done = commands(CHUNKS, *SMALL_CHUNKS, f"out={tmp_path}")
    assert (done.code, done.err) == (0, "")
    now = cells.read_text().splitlines()
    assert now[: len(kept)] == kept
    # Two lengths of U = 2, 4, 6, 8 and plain; the live peaks; three starts of pairs.
    assert len(now) == 2 * 5 + 1 + 3
    assert len({json.loads(line)["key"] for line in now}) == len(now)

    records = RecordFile(tmp_path / "records.jsonl").read()
    assert len(records) == 2 * 5 * 4 + 2 * 5
    for line in (tmp_path / "records.jsonl").read_text().splitlines():
        assert json.loads(line).keys() >= RECORD_KEYS
    assert {record.quantity for record in records if record.hardware == "traced"} == {
        *("peak_units_forward", "peak_units_backward", "peak_memory_gib", "heads_moved")
    }
    variants = {str(record.get("variant")) for record in records if record.hardware == "cpu"}
    assert variants == {"ulysses", "ulysses, checkpoint", "upipe, U = 2", "upipe, U = 4", "upipe, U = 8"}
    for variant in variants:
        assert re.search(rf"{re.escape(variant)} ", done.out)
    assert (tmp_path / "chunks.png").read_bytes().startswith(b"\x89PNG")
