"""Commands as a user types them, in processes that start fast: forked from one that has imported everything.

``python -m tests.experiments.commands`` is that process. It reads calls as lines of JSON and answers each with a line.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    code: int
    out: str
    err: str


class Commands:
    """Run modules as ``python -m module args``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, module: str, *args: str) -> Finished:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([module, *args]) + "\n")
        self._process.stdin.flush()
        return Finished(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    import experiments.chunks  # the imports that take the time
    import experiments.train  # noqa: F401

    for line in sys.stdin:
        module, *args = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if not child:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = [module, *args]
                for name in ("experiments.chunks", "experiments.train"):
                    del sys.modules[name]
                # What it raises leaves this process as it would leave the interpreter.
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                sys.exit()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        sys.stdout.write(json.dumps({"code": code, "out": texts[0], "err": texts[1]}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
