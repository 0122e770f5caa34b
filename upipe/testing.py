"""Ranks, groups and error budgets for tests, notebooks and experiments.

``run_ranks`` starts real processes over gloo. They come from a fork server that has torch loaded, so a test on four
ranks takes a fraction of a second.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "pytest", "hypothesis", "upipe")


class RankError(RuntimeError):
    """A rank of :func:`run_ranks` failed; the message is that rank's traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` in `world_size` processes joined by gloo and return what each returned, by rank.

    Every rank has one thread and a default process group; `fn` reads its rank from ``torch.distributed``.

    Args:
        fn: a function that can be imported by name (not a lambda, not defined in a notebook or in ``__main__``).
        world_size: number of processes.
        args: passed to every rank; must pickle.
        timeout_s: seconds until the ranks are ended and the call fails.

    Raises:
        RankError: a rank raised or died. The others are ended at once, so a failure never waits for a timeout.
        TimeoutError: `timeout_s` passed.

    >>> import operator
    >>> run_ranks(operator.add, 2, 1, 2)
    [3, 3]
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="upipe_ranks_") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(sender, rank, world_size, str(Path(folder, "rendezvous")), fn, args)
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    pending = set(range(len(pipes)))
    while pending:
        ready = wait([pipes[rank] for rank in pending], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending)} did not finish in {timeout_s} s")
        for rank in [rank for rank in pending if pipes[rank] in ready]:
            pending.remove(rank)
            try:
                ok, payload = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank}:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return results


def _rank_main(
    sender: Connection, rank: int, world_size: int, rendezvous: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        # Serialised here: a shared-memory tensor would vanish with this process.
        payload = io.BytesIO()
        torch.save(fn(*args), payload)
        sender.send((True, payload.getvalue()))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))


@contextmanager
def lone_rank() -> Iterator[dist.ProcessGroup]:
    """Join this process alone to a gloo group of one rank, and leave it again.

    Raises:
        RuntimeError: a process group is already there (from torch).

    >>> with lone_rank() as group:
    ...     group.size()
    1
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return ``|value - truth| / |truth|`` in the Frobenius norm, computed in fp64; 0 where both are zero."""
    truth = truth.double()
    difference = torch.linalg.vector_norm(value.double() - truth)
    return float(difference / torch.linalg.vector_norm(truth)) if difference else 0.0


def assert_exact(value: Tensor, truth: Tensor, name: str, *, tolerance: float = 1e-10) -> None:
    """Hold `value` to an fp64 `truth`: largest difference at most `tolerance` times the largest of `truth`, or 1.

    Raises:
        AssertionError: the difference is larger, not a number, or the shapes differ.
    """
    assert value.shape == truth.shape, f"{name}: shape {list(value.shape)} is not {list(truth.shape)}"
    if truth.numel() == 0:
        return
    value, truth = value.detach(), truth.detach()
    difference = float((value.double() - truth.double()).abs().max())
    bound = tolerance * max(1.0, float(truth.double().abs().max()))
    assert difference <= bound, f"{name}: differs by {difference:.3e}, allowed {bound:.3e}"


def assert_within_budget(error: float, baseline: float, name: str, *, factor: float = 1.25) -> None:
    """Hold an error to `factor` times the error of a baseline on the same input.

    Raises:
        AssertionError: `error` is larger or not a number.
    """
    assert error <= factor * baseline, f"{name}: error {error:.3e} above {factor} x {baseline:.3e} of the baseline"
