"""FSDP2: gradients summed over the ranks, as :func:`upipe.context_parallel_loss` needs them."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Make every FSDP2 module in `model` sum gradients over its ranks instead of averaging them.

    Both settings are needed, on every module: on the root alone the others go on averaging in silence.

    Args:
        model: after ``fully_shard``.

    Raises:
        ValueError: nothing in `model` is an FSDP2 module.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("no part of the model is an FSDP2 module; call fully_shard first")
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
