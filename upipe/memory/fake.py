"""One rank of many in one CPU process: fake tensors, and a process group that only pretends to exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_NONE: Mapping[str, object] = MappingProxyType({})
_ARANGE = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Be rank `rank` of `world_size`: tensors have shapes but no memory, exchanges return at once.

    Inside, every new tensor is fake, on device "cpu" (autograd on fake "cuda" tensors aborts in a CPU build of torch).
    What reads a value (``item()``, ``if tensor``) raises. Not fake are:

    - int32 tensors made from Python numbers, and ``torch.arange(n, dtype=torch.int32)`` up to `world_size`: document
      borders and the tables of ranks of a DeviceMesh, whose values are needed;
    - tensors on device "meta", and what is computed from real tensors alone. Real and fake together give fake, so a
      real ``cu_seqlens`` may be used with a fake x. Build the model inside, or its weights take real memory.

    Device meshes and fully_shard work as usual: build the model on meta, shard it, then ``to_empty(device="cpu")``, or
    the unsharded weights are counted. ``module.to(dtype)`` works on meta; torch refuses it for fake parameters.

    Args:
        world_size: ranks in the default process group.
        rank: this one, 0 <= rank < world_size.

    Yields:
        The default process group.

    Raises:
        ValueError: a process group is already there, or `rank` is not one of the ranks.

    >>> with fake_ranks(8) as group:
    ...     x = torch.empty(5_000_000, 4096, dtype=torch.bfloat16)  # 38 GiB
    ...     dist.all_reduce(x, group=group)
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to world_size-1; world_size={world_size}, so choose another")
    if dist.is_initialized():
        raise ValueError(
            f"a process group of {dist.get_world_size()} ranks ({dist.get_backend()}) is there already, and fake_ranks "
            "makes the default one; call torch.distributed.destroy_process_group() first, or use another process"
        )
    # The import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        assert dist.group.WORLD is not None
        with _RankMode(world_size):
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class _RankMode(FakeTensorMode):
    """Fake tensors, except those that must have values."""

    def __init__(self, world_size: int) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._world_size = world_size

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] = _NONE
    ) -> Any:
        # `types` names tensor subclasses only, so it is empty when no argument is fake or a DTensor.
        if not types and self._stays_real(func, args, kwargs or _NONE):
            return func(*args, **(kwargs or _NONE))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _stays_real(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        tensors = [leaf for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "meta":
            return True
        if func in _ARANGE:
            numbers = [number for number in args if isinstance(number, int)]
            return kwargs.get("dtype") is torch.int32 and max(map(abs, numbers), default=0) <= self._world_size
        if func is aten.lift_fresh.default:
            return tensors[0].dtype is torch.int32
        leaves_meta = device is not None and any(tensor.is_meta for tensor in tensors)
        return bool(tensors) and not leaves_meta
