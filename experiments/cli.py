"""What the commands share: a composed config, and errors that are one line and exit code 2."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import is_dataclass
from typing import Any, NoReturn, get_type_hints

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import paper_configs
from experiments.config import Config, from_hydra, unknown_key

# What a user can cause; anything else is a defect and keeps its traceback.
USER_ERRORS = (ValueError, HydraException, OmegaConfBaseException)


def compose(name: str, schema: type = Config) -> Any | None:
    """Compose paper_configs/`name`.yaml with the command line into `schema`.

    Returns:
        The config, or None when the call asked only to print something (--help, --cfg job).

    Raises:
        USER_ERRORS: an unknown key or group, a wrong type, a value out of bounds.
    """
    composed: list[DictConfig] = []
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises instead of printing a traceback and exiting with 1
    run = hydra.main(version_base="1.3", config_path=str(next(iter(paper_configs.__path__))), config_name=name)
    try:
        run(composed.append)()
    except HydraException as error:
        # Hydra proposes to append the key, which the schema refuses.
        unknown = re.match(r"Could not override '([\w.]+)'", str(error))
        raise ValueError(_unknown_key(unknown[1], schema)) if unknown else error from None
    return from_hydra(composed[0], schema) if composed else None


def _unknown_key(key: str, schema: type) -> str:
    prefix = ""
    for part in key.split("."):
        inner = get_type_hints(schema).get(part)
        if not is_dataclass(inner):
            break
        schema, prefix = inner, f"{prefix}{part}."
    return unknown_key(key, schema, prefix)


def one_line(error: BaseException) -> str:
    """Return an error's message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    dropped = ("Set the environment variable", "full_key:", "object_type=", "Config search path:", "provider=")
    return " ".join(line for line in lines if not line.startswith(dropped)) or type(error).__name__


def fail(message: str) -> NoReturn:
    """Print one line and exit with 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
