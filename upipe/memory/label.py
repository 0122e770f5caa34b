"""Names for memory: a region whose allocations a trace counts under one owner."""

from __future__ import annotations

import torch

PREFIX = "upipe/"


def label(name: str) -> torch.profiler.record_function:
    """Return a context in which new storages belong to owner `name`; torch.profiler shows it too.

    >>> with label("attn.q"):
    ...     q = torch.empty(2)
    """
    return torch.profiler.record_function(PREFIX + name)
