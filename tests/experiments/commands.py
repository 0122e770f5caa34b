"""Commands as a user types them, in processes that start fast: forked from one that has imported everything.

``python -m tests.experiments.commands`` is that process. It reads requests as lines of JSON and answers each with a
line: a call with its process id, a process id with the exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    code: int
    out: str
    err: str


class Started:
    """A command that runs, the first of a process group of its own, as in a terminal."""

    def __init__(self, commands: Commands, call: dict[str, Any]) -> None:
        self._commands = commands
        self._out, self._err = Path(call["out"]), Path(call["err"])
        self._out.touch()
        self._err.touch()
        self._pid = commands.ask(call)["pid"]

    @property
    def out(self) -> str:
        return self._out.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._pid, number)

    def wait(self, *, timeout_s: float = 60.0) -> Finished:
        """Wait for the end; a command that takes longer is killed, which shows in its code."""
        code = self._commands.ask({"wait": self._pid, "timeout_s": timeout_s})["code"]
        return Finished(code, self.out, self._err.read_text())


class Commands:
    """Run modules as ``python -m module args`` in `folder`, with the output in files there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, module: str, *args: str) -> Finished:
        return self.start(module, *args).wait()

    def start(self, module: str, *args: str, folder: Path | None = None, env: dict[str, str] | None = None) -> Started:
        self._count += 1
        outputs = self.folder / "command_outputs"
        outputs.mkdir(exist_ok=True)
        call = {
            "module": module,
            "args": args,
            "env": env or {},
            "folder": str(folder or self.folder),
            "out": str(outputs / f"{self._count}.out"),
            "err": str(outputs / f"{self._count}.err"),
        }
        return Started(self, call)

    def ranks(self, module: str, *args_by_rank: Sequence[str], folders: Sequence[Path] | None = None) -> list[Started]:
        """Start ranks that find each other as torchrun lets them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(args_by_rank))}
        return [
            self.start(
                module,
                *args,
                folder=folders[rank] if folders else None,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, args in enumerate(args_by_rank)
        ]

    def ask(self, request: dict[str, Any]) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that starts the commands is gone"
        return json.loads(answer)

    @classmethod
    @contextmanager
    def serving(cls, folder: Path) -> Iterator[Commands]:
        commands = cls(folder)
        try:
            yield commands
        finally:
            commands._process.communicate()


def wait_until(happened: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def exit_code(pid: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)


def serve() -> None:
    import torch._dynamo  # noqa: F401 - what takes the time

    import experiments.chunks
    import experiments.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": exit_code(request["wait"], request["timeout_s"])}
        else:
            ready, child_is_ready = os.pipe()
            answer = {"pid": os.fork()}
            if not answer["pid"]:
                break
            os.close(child_is_ready)
            os.read(ready, 1)  # the child has a group of its own now
            os.close(ready)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    else:
        return
    os.setsid()
    os.close(ready)
    os.close(child_is_ready)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_TRUNC), number)
    os.close(0)
    os.chdir(request["folder"])
    os.environ.update(request["env"])
    sys.argv = [request["module"], *request["args"]]
    for name in ("experiments.chunks", "experiments.train"):
        del sys.modules[name]
    # What it raises leaves this process as it would leave the interpreter.
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
