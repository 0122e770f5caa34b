"""Resumable checkpoints by torch.distributed.checkpoint: whole or absent, never torn.

A checkpoint is written under a temporary name and renamed when every rank is done, so a run killed at any moment finds
the last whole one. Any number of ranks can load it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from experiments.config import Config, flat
from experiments.step import TrainingStep

# What a checkpoint's weights and position in the data depend on. Method, ranks and length of training may change.
BOUND = (
    *("model.", "data.source", "data.token_dtype", "data.sequence_length", "data.shuffle", "data.held_out_fraction"),
    "train.seed",
)
RUN_FILE = "run.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Checkpoints:
    """The checkpoints of one output folder.

    Args:
        config: of this run.
        folder: where they lie; made when the first is saved.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.keep = config.train.keep_checkpoints
        self.bound = {
            key: value for key, value in flat(config).items() if key.startswith(BOUND) and key != "model.name"
        }

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        return next(iter(self.newest_first()), None)

    def newest_first(self) -> list[Path]:
        return [file.parent for file in sorted(self.folder.glob(f"step_*/{RUN_FILE}"), reverse=True)]

    def save(self, step: int, training: TrainingStep, loader_state: dict[str, int]) -> None:
        """Save after `step` steps; all ranks call it."""
        target = self.folder / f"step_{step:08d}"
        partial = self._partial(target)
        if dist.get_rank() == 0:
            self.remove_leftovers()
            partial.mkdir(parents=True)
        dist.barrier()
        try:
            dcp.save(_state(training), checkpoint_id=partial)
        except CheckpointException as error:
            # It wraps Ctrl-C too.
            if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
                raise KeyboardInterrupt from None
            raise
        dist.barrier()
        if dist.get_rank() == 0:
            with (partial / RUN_FILE).open("w") as file:
                json.dump({"step": step, "loader": loader_state, "config": self.bound}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():  # without RUN_FILE, so no checkpoint
                shutil.rmtree(target)
            partial.rename(target)
            for old in sorted(self.folder.glob("step_*"))[: -self.keep]:
                old.rename(self._partial(old))  # never half there under its name
            self.remove_leftovers()
        dist.barrier()

    def remove_leftovers(self) -> None:
        """Remove what killed runs left unfinished; one rank calls it."""
        for leftover in self.folder.glob(".partial_*"):
            shutil.rmtree(leftover)

    @staticmethod
    def step_of(checkpoint: Path) -> int:
        return int(checkpoint.name.removeprefix("step_"))

    def _partial(self, checkpoint: Path) -> Path:
        return self.folder / f".partial_{checkpoint.name}"

    def read_run(self, checkpoint: Path) -> dict[str, Any]:
        """Return step and loader state of a checkpoint.

        Raises:
            ValueError: it is of another model or other data; the values are named.
        """
        run = json.loads((checkpoint / RUN_FILE).read_text())
        differs = {key: (run["config"].get(key), value) for key, value in self.bound.items()}
        differs = {key: pair for key, pair in differs.items() if pair[0] != pair[1]}
        if differs:
            listed = ", ".join(f"{key}={theirs} there and {ours} here" for key, (theirs, ours) in differs.items())
            raise ValueError(
                f"the checkpoint {checkpoint} is of another model or other data: {listed}; use another out=DIR or "
                "the first run's values"
            )
        return run

    def load(self, checkpoint: Path, training: TrainingStep, run: dict[str, Any]) -> None:
        """Load weights and optimizer; all ranks call it."""
        state = _state(training)
        dcp.load(state, checkpoint_id=checkpoint)
        if training.config.model.tied_head:
            state["model"][HEAD] = state["model"][EMBEDDING]
        set_state_dict(
            training.decoder,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        training.steps = run["step"]


def _state(training: TrainingStep) -> dict[str, dict[str, Any]]:
    """Return what is saved; a head that is the embedding once."""
    model, optimizer = get_state_dict(training.decoder, training.optimizer)
    if training.config.model.tied_head:
        del model[HEAD]
    return {"model": model, "optimizer": optimizer}
