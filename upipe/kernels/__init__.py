"""Local exact attention: kernels with one interface, and the choice among them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from upipe.kernels import blocked, flash, reference, sdpa
from upipe.kernels.kernel import Kernel, Request, accumulate_dtype, sink_gradient
from upipe.mask import AttentionMask

__all__ = ["KERNELS", "Kernel", "accumulate_dtype", "select_kernel", "sink_gradient", "workspace_bytes"]

# Fastest first; "auto" takes the first that does not refuse. The reference is for tests and never taken by "auto".
KERNELS = (flash.KERNEL, sdpa.KERNEL, blocked.KERNEL, reference.KERNEL)

_WORKSPACE: dict[OpOverload, Callable[..., int]] = {}
for _kernel in KERNELS:
    _WORKSPACE[_kernel.forward_op._opoverload] = _kernel.forward_workspace
    _WORKSPACE[_kernel.backward_op._opoverload] = _kernel.backward_workspace


def select_kernel(name: str, mask: AttentionMask, like: Tensor) -> Kernel:
    """Return the kernel called `name`, or for "auto" the fastest that covers the mask, dtype and device.

    Args:
        name: "auto", "flash", "sdpa", "blocked" or "reference".
        mask: what it has to cover.
        like: a query tensor, ``[..., D]``. A fake one stands for another machine: "flash" can then be named without
            the package, and "auto" takes what a real tensor on the same device would get.

    Raises:
        ValueError: no such kernel, or an explicit choice that does not cover the request.

    The choice of "auto" is logged once, at level INFO of the logger ``upipe``.
    """
    by_name = {kernel.name: kernel for kernel in KERNELS}
    fake = isinstance(like, FakeTensor)
    request = Request(mask, like.dtype, like.device, like.shape[-1], fake=fake and name != "auto")
    if name == "auto":
        for kernel in KERNELS[:-1]:
            if kernel.refuses(request) is None:
                _log_choice(kernel.name, str(like.dtype), like.device.type)
                return kernel
        raise ValueError(f"no kernel covers {like.dtype} on {like.device}; use a floating dtype")
    if name not in by_name:
        raise ValueError(f"kernel={name!r} is not known; choose auto, {', '.join(by_name)}")
    reason = by_name[name].refuses(request)
    if reason is not None:
        others = [kernel.name for kernel in KERNELS if kernel.refuses(request) is None]
        way_out = f"choose auto or {', '.join(others)}" if others else "no kernel can; use a floating dtype"
        raise ValueError(f"kernel={name!r} cannot do this: {reason}; {way_out}")
    return by_name[name]


@functools.cache
def _log_choice(kernel: str, dtype: str, device: str) -> None:
    logging.getLogger("upipe").info("attention kernel: %s (%s on %s)", kernel, dtype, device)


def workspace_bytes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes an attention op allocates inside, 0 for any other op. A trace adds them while the op runs."""
    workspace = _WORKSPACE.get(op)
    return 0 if workspace is None else workspace(*args, **kwargs)
