"""Finished pieces of a long command, so that it can be interrupted and continued."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Cells:
    """Results by key in one file of JSON lines; a line torn by a kill is ignored and overwritten.

    Args:
        path: of the file.
        config: what the results depend on; results of another config are dropped.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self._config = json.loads(json.dumps(config))
        self._done = dict(self._read())
        with path.open("w") as file:
            for key, value in self._done.items():
                file.write(self._line(key, value))

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def __getitem__(self, key: str) -> Any:
        return self._done[key]

    def put(self, key: str, value: Any) -> None:
        """Keep a result that JSON can hold."""
        self._done[key] = json.loads(json.dumps(value))
        with self.path.open("a") as file:
            file.write(self._line(key, value))
            file.flush()
            os.fsync(file.fileno())

    def _line(self, key: str, value: Any) -> str:
        return json.dumps({"config": self._config, "key": key, "value": value}) + "\n"

    def _read(self) -> Iterator[tuple[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["config"] == self._config:
                yield entry["key"], entry["value"]
