"""What tests of the commands share: the process that starts them, a text, and a small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.commands import Commands


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands.serving(tmp_path_factory.mktemp("commands")) as started:
        yield started


@pytest.fixture(scope="module")
def text(commands: Commands) -> Path:
    path = commands.folder / "text.txt"
    path.write_text("".join(f"{i} times {i % 7} is {i * (i % 7)}; " for i in range(200)))
    return path


@pytest.fixture(scope="module")
def small(text: Path) -> list[str]:
    """Arguments of a training run that takes a second; 61 tokens leave ranks uneven parts."""
    return [
        *("model.hidden_size=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.ffn=48"),
        *("data=files", f"data.source={text}", "data.sequence_length=61", "train.dtype=float64"),
        *("train.steps=12", "train.save_every=3", "train.eval_every=4", "train.eval_batches=1", "train.trace_every=0"),
    ]
