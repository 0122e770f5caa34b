"""Train a small Llama-shaped decoder on real text, the sequence sharded over the ranks.

torchrun --nproc-per-node 4 -m experiments.train
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.checkpoint import Checkpoints
from experiments.cli import USER_ERRORS, compose, fail, one_line
from experiments.config import Config, flat
from experiments.data import Batches, Corpus, eval_batches, load_tokens, split
from experiments.records import Record, RecordFile, commit, open_output, versions
from experiments.step import NonFiniteError, StepResult, TrainingStep, build_mesh, build_step
from upipe import memory

HEADER = f"{'step':>6}  {'loss (nll)':>10}  {'grad norm':>9}  {'tokens/s':>9}  {'live peak':>10}  {'lr':>8}"


def main() -> None:
    config, error = None, None
    try:
        try:
            config = compose("train")
        except USER_ERRORS as caught:
            error = one_line(caught)
        if config is None and error is None:
            return
        join_ranks()
        agree(error)
        check_same_config(config)
        Training(config).run()
    except NonFiniteError as caught:
        fail_together(str(caught))
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def join_ranks() -> None:
    """Join the ranks that torchrun started, or make a group of one."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def agree(error: str | None) -> None:
    """End all ranks together, with one line, when any of them has an error."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = [rank for rank, text in enumerate(errors) if text is not None]
    if not failed:
        return
    text = errors[failed[0]]
    where = "" if len(failed) == len(errors) else f"rank {failed[0]}: "
    fail_together(f"{where}{text}")


def together(part: Callable[[], None]) -> None:
    """Run what a user's mistake can end; all ranks end with it."""
    error = None
    try:
        part()
    except USER_ERRORS as caught:
        error = one_line(caught)
    agree(error)


def fail_together(message: str) -> None:
    """Exit with 2 on every rank; rank 0 prints the line."""
    if dist.get_rank() == 0:
        fail(message)
    raise SystemExit(2)


def use_device(config: Config) -> None:
    """Take this rank's GPU, where the config wants one.

    Raises:
        ValueError: there is none.
    """
    if config.hardware.device != "cuda":
        return
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise ValueError(
            f"hardware={config.hardware.name} needs a CUDA device a rank and torch {torch.__version__} sees {count}; "
            + (f"start at most {count} ranks a machine" if count else "use hardware=cpu")
        )
    torch.cuda.set_device(rank)


def check_same_config(config: Config) -> None:
    """End all ranks when they were started with different configs."""
    configs: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(configs, flat(config))
    for rank, other in enumerate(configs):
        keys = [key for key, value in configs[0].items() if other[key] != value]
        if keys:
            listed = ", ".join(f"{key}={configs[0][key]} on rank 0 and {other[key]} on rank {rank}" for key in keys)
            fail_together(f"ranks were started with different configs: {listed}; start all with the same command")


class Training:
    """One run: what it reads, what it trains, what it writes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.leader = dist.get_rank() == 0
        self.ranks = dist.get_world_size()
        together(self._read)
        together(self._build)
        together(self._resume)
        self.commit, self.versions = commit(), versions()

    def _read(self) -> None:
        """Open what the run needs; other ranks may find something else, so nothing here waits for them."""
        config = self.config
        use_device(config)
        self.out = open_output(config.out)
        self.records = RecordFile(self.out / "records.jsonl")
        self.records.read()
        self.checkpoints = Checkpoints(config, self.out / "checkpoints")
        self.resumed = self.checkpoints.latest()
        self.run_state = None if self.resumed is None else self.checkpoints.read_run(self.resumed)
        corpus = load_tokens(config.data.source, config.model.vocab, token_dtype=config.data.token_dtype)
        self.train_part, self.held_out = split(corpus, config.data.held_out_fraction)

    def _build(self) -> None:
        mesh = build_mesh(self.config)
        self.shards, self.shard = mesh["data"].size(), mesh["data"].get_local_rank()
        self.loader = self._batches(self.train_part)
        self.held_out_batches()  # raises now, not at the first evaluation
        self.training: TrainingStep = build_step(self.config, mesh)

    def _resume(self) -> None:
        self.step, self.live_peak = 0, None
        if self.resumed is not None:
            self.loader.load_state_dict(self.run_state["loader"])
            self.checkpoints.load(self.resumed, self.training, self.run_state)
            self.step = self.run_state["step"]
        if self.leader:
            self.checkpoints.remove_leftovers()
            self.records.truncate_after(self.step)

    def _batches(self, corpus: Corpus) -> Batches:
        data, train = self.config.data, self.config.train
        return Batches(
            corpus,
            sequence_length=data.sequence_length,
            batch_size=data.batch_size // train.accumulation,
            seed=train.seed,
            shuffle=data.shuffle,
            documents=data.documents,
            num_shards=self.shards,
            shard=self.shard,
        )

    def held_out_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        data, train = self.config.data, self.config.train
        return eval_batches(
            self.held_out,
            sequence_length=data.sequence_length,
            batch_size=data.batch_size // train.accumulation,
            limit=train.eval_batches * data.batch_size,
            documents=data.documents,
            num_shards=self.shards,
            shard=self.shard,
        )

    def run(self) -> None:
        train = self.config.train
        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        show = self.leader and console.is_terminal
        with Progress(*columns, console=console, disable=not show, transient=True) as progress:
            task = progress.add_task("training", total=train.steps, completed=self.step)
            self.say(console, self._title())
            self.say(console, HEADER)
            while self.step < train.steps:
                self._one_step(console)
                progress.update(task, completed=self.step)
                last = self.step == train.steps
                with self._named_failures(self.step):
                    if train.eval_every and (self.step % train.eval_every == 0 or last):
                        self._evaluate(console)
                    if self.step % train.save_every == 0 or last:
                        self.training.check_weights()
                        self.checkpoints.save(self.step, self.training, self.loader.state_dict())
        self.say(console, f"records and checkpoints are in {self.out}")

    def _title(self) -> str:
        config = self.config
        where = f"from step {self.step}" if self.step else "from the beginning"
        if self.step >= config.train.steps:
            where = f"all {self.step} steps are done; a larger train.steps continues"
        return (
            f"{config.model.name}, method {config.method.name}, {self.ranks} ranks "
            f"({self.shards} data x {self.ranks // self.shards} context), {config.data.sequence_length} tokens, {where}"
        )

    @contextlib.contextmanager
    def _named_failures(self, step: int) -> Iterator[None]:
        """Add step and way out to a NonFiniteError."""
        try:
            yield
        except NonFiniteError as caught:
            kept = self.checkpoints.newest_first()
            where = f"the last checkpoint is {kept[0]}" if kept else "no checkpoint was written yet"
            if len(kept) > 1 and self.checkpoints.step_of(kept[0]) == step - 1:
                where += f" (no step after it was finite; remove it to continue from {kept[1].name})"
            raise NonFiniteError(f"step {step}: {caught}; {where}; lower train.lr or check the data") from None

    def say(self, console: Console, line: str) -> None:
        if self.leader:
            console.print(line, markup=False)

    def _one_step(self, console: Console) -> None:
        started = time.perf_counter()
        batches = [self.loader.next_batch() for _ in range(self.config.train.accumulation)]
        with self._named_failures(self.step + 1):
            result = self._measured(lambda: self.training(batches))
        seconds = time.perf_counter() - started
        self.step += 1
        speed = result.tokens / seconds
        peak = "-" if self.live_peak is None else f"{self.live_peak / 2**20:.1f} MiB"
        self.say(
            console,
            f"{self.step:6d}  {result.nll:10.6f}  {result.grad_norm:9.4f}  {speed:9.0f}  {peak:>10}  {result.lr:8.2e}",
        )
        self._record(
            "nll",
            result.nll,
            split="train",
            grad_norm=result.grad_norm,
            valid_tokens=result.valid_tokens,
            lr=result.lr,
            tokens_per_s_per_rank=speed / self.ranks,
            live_peak_bytes=self.live_peak,
        )

    def _measured(self, step: Any) -> StepResult:
        """Run a step; on CUDA read the allocator, on CPU trace every trace_every-th step."""
        every = self.config.train.trace_every
        if self.config.hardware.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            result = step()
            self.live_peak = torch.cuda.max_memory_allocated()
            return result
        if not every or self.step % every:
            return step()
        results: list[StepResult] = []
        timeline = memory.trace(lambda: results.append(step()))
        self.live_peak = timeline.peak_bytes
        return results[0]

    def _evaluate(self, console: Console) -> None:
        nll = self.training.evaluate(self.held_out_batches())
        self.say(console, f"{self.step:6d}  {nll:10.6f}  on held-out text")
        self._record("nll", nll, split="held_out")

    def _record(self, quantity: str, value: float, **extra: Any) -> None:
        if self.leader:
            self.records.append(
                Record(
                    experiment=self.config.name,
                    method=self.config.method.name,
                    model=self.config.model.name,
                    hardware=self.config.hardware.name,
                    length_tokens=self.config.data.sequence_length,
                    quantity=quantity,
                    value=value,
                    commit=self.commit,
                    versions=self.versions,
                    extra={"step": self.step, "ranks": self.ranks, **extra},
                )
            )


if __name__ == "__main__":
    main()
