"""The trace: a dispatch mode that sees every op and tells a ledger which storages it met and made.

Nothing here depends on values, so real CPU tensors and fake ones give the same stream.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from upipe.memory.label import PREFIX
from upipe.memory.ledger import Ledger, Step, Storage, is_resized, plain_tensors
from upipe.memory.timeline import Timeline

Workspace = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], int]

_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXIT = torch.ops.profiler._record_function_exit._RecordFunction
# They move no memory, and how often they run differs between real and fake tensors.
_IGNORED = frozenset({torch.ops.prim.device.default, torch.ops.aten.detach.default})
_LIFT = torch.ops.aten.lift_fresh.default
_TO_HOST = "upipe::to_host"
_FSDP_PREFIX = "FSDP::"
_FSDP_UNSHARDED = "fsdp.all_gather_copy_out"


def trace(
    fn: Callable[[], object],
    *,
    owners: Mapping[str, Iterable[Tensor]] | None = None,
    workspace: Workspace | None = None,
) -> Timeline:
    """Run `fn` and record which bytes are alive at every op, and who owns them.

    What `fn` returns is dropped inside the trace; keep it elsewhere to see it alive at the end. The owner of a storage
    is the first of these that applies:

    1. what `owners` says;
    2. "gradient": it is the ``.grad`` of a parameter, at the end or when an op meets the parameter;
    3. the innermost :func:`upipe.memory.label` in force when it was allocated. The regions of FSDP2 count as labels:
       "fsdp.all_gather_copy_out" owns unsharded weights;
    4. "parameter": an op met it as an nn.Parameter;
    5. "input" if it was there before, else "other".

    What was there before counts from the start on if an op meets it or `owners` names it. FSDP2 hands shards to ops as
    plain tensors, so name them: ``owners={"parameter": model.parameters()}``. The outputs of an op called
    ``upipe::to_host`` are host memory, and so are CPU tensors when others are on an accelerator. An op on DTensors,
    like a custom op, is one op whatever it does inside. Garbage is not collected while `fn` runs: a reference cycle
    counts as alive, in every run alike.

    Args:
        fn: called once, without arguments, on real or fake tensors.
        owners: owner -> tensors whose storages count under it from the start; with those of "parameter", and any
            nn.Parameter, their gradients.
        workspace: ``(op, args, kwargs)`` -> bytes the op allocates inside, counted under "kernel.workspace" while its
            outputs are alive. None is :func:`upipe.kernels.workspace_bytes`.

    Returns:
        The timeline.

    Raises:
        ValueError: two entries of `owners` share a storage, or an op meets a tensor that is not strided.

    Cost: 0.02 ms an op; one that allocates also reads the size of every live storage, 0.015 ms for 100
    (tests/upipe/memory/test_trace.py, TestCost).

    >>> x = torch.zeros(1000)
    >>> timeline = trace(lambda: (x + 1).sum())
    >>> timeline.peak_bytes, timeline.at_peak
    (8004, {'other': 4004, 'input': 4000})
    """
    if workspace is None:
        from upipe.kernels import workspace_bytes

        workspace = workspace_bytes
    tracker = _Tracker(workspace)
    for owner, tensors in (owners or {}).items():
        for tensor in tensors:
            tracker.claim(tensor, owner)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with tracker:
            fn()
    finally:
        if collecting:
            gc.enable()
    return tracker.close()


class _Tracker(TorchDispatchMode):
    """Turns ops into steps of a ledger. What is freed after an op belongs to that op, for real and fake alike."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self._workspace = workspace
        self._ledger = Ledger()
        self._labels: list[tuple[int, str]] = []  # handle of the region, owner
        self._parameters: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        if func is _ENTER or func is _EXIT:
            return self._region(func, args, kwargs)
        ledger, step = self._ledger, Step(func, self._labels[-1][1] if self._labels else "")
        ledger.notice_frees()
        # What is lifted was made from Python numbers an instant ago, outside any op; the output stands for it.
        met = [] if func is _LIFT else [known for t in _tensors((args, kwargs)) for known in self._meet(t, step)]
        out = func(*args, **kwargs)
        before = ledger.steps[-1]
        ledger.steps.append(step)
        ledger.notice_frees()
        for tensor in _tensors(out):
            for plain in plain_tensors(tensor):
                ledger.allocate(plain, step.label or "other", step, on_host=func.name() == _TO_HOST)
        step.workspace_bytes = self._workspace(func, args, kwargs)
        # Sizes matter where bytes are added: then all are read again, so that nothing is counted that is gone.
        if step.new or step.workspace_bytes or any(map(is_resized, met)):
            ledger.notice_resizes(before, step)
        return out

    def claim(self, tensor: Tensor, owner: str) -> None:
        """Count a tensor from the start under `owner`."""
        for plain in plain_tensors(tensor):
            known = self._ledger.adopt(plain, owner)
            if known is None:
                continue
            if known.explicit and known.owner != owner:
                raise ValueError(
                    f"owners: {owner!r} and {known.owner!r} share a storage (met as {list(plain.shape)}); "
                    "name it under one of them"
                )
            known.owner, known.explicit = owner, True
        if owner == "parameter" or _is_parameter(tensor):
            self._watch(tensor)

    def close(self) -> Timeline:
        """Return the timeline; nothing is traced after it."""
        for reference in self._parameters.values():
            parameter = reference()
            if parameter is not None:
                self._own_gradient(parameter)
        return self._ledger.close()

    def _region(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        # Regions need not end innermost first. A handle comes back as another object with the same hash.
        handle = hash(out if func is _ENTER else args[0])
        self._labels = [entry for entry in self._labels if entry[0] != handle]
        if func is _ENTER and (owner := _owner_of_region(args[0])):
            self._labels.append((handle, owner))
        return out

    def _meet(self, tensor: Tensor, step: Step) -> Iterator[Storage]:
        parameter = _is_parameter(tensor)
        for plain in plain_tensors(tensor):
            # FSDP2 keeps the storages it gathers into, empty between uses: one met here first has just grown.
            grown = step.label == _FSDP_UNSHARDED
            known = self._ledger.allocate(plain, step.label, step) if grown else self._ledger.adopt(plain, "input")
            if known is not None:
                if parameter and known.owner in ("input", "other"):
                    known.owner = "parameter"
                yield known
        if parameter:
            self._watch(tensor)

    def _watch(self, parameter: Tensor) -> None:
        self._parameters[id(parameter)] = weakref.ref(parameter)
        self._own_gradient(parameter)

    def _own_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad if parameter.is_leaf else None
        for plain in plain_tensors(gradient) if gradient is not None else ():
            known = self._ledger.adopt(plain, "gradient")
            if known is not None and not known.explicit:
                known.owner = "gradient"


def _owner_of_region(name: str) -> str | None:
    """``upipe/attn.q`` -> attn.q, ``FSDP::all_gather (layers.0)`` -> fsdp.all_gather, any other name -> None."""
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX)
    if name.startswith(_FSDP_PREFIX):
        return "fsdp." + name.removeprefix(_FSDP_PREFIX).split(" ")[0]
    return None


def _is_parameter(tensor: Tensor) -> bool:
    return type(tensor) is nn.Parameter or getattr(tensor, "_is_param", False)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an op."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))
