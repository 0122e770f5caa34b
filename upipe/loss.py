"""The loss of a sequence that is spread over ranks.

Every rank divides its own sum by the tokens of all ranks, so nothing is averaged twice: gradients are SUMMED over ranks
and micro-batches, whatever the number of valid tokens of each.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from upipe.collectives import all_reduce_sum


def valid_token_count(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return how many labels are not `ignore_index`: an int64 scalar on their device, without a synchronisation.

    >>> valid_token_count(torch.tensor([[3, -100, 5]]))
    tensor(2)
    """
    return (labels != ignore_index).sum()


def context_parallel_loss(loss_sum: Tensor, valid_tokens: int | Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's share of the mean token loss of the global batch.

    The SUM of the shares over the ranks of `group`, and over the micro-batches of an accumulation window, is the
    token-weighted negative log-likelihood. So gradients are to be summed over these ranks, never averaged (FSDP2:
    ``set_gradient_divide_factor(1.0)`` and ``set_force_sum_reduction_for_comms(True)`` on every FSDPModule), and shares
    are added up before they are logged.

    Args:
        loss_sum: differentiable scalar, float32 or float64: the sum of the token losses of one micro-batch on this
            rank, as ``cross_entropy(..., reduction="sum")`` gives it.
        valid_tokens: valid tokens on this rank over the WHOLE accumulation window, an int or an integer scalar tensor:
            the sum of :func:`valid_token_count` over its micro-batches. The same for each of them.
        group: all ranks whose gradients are summed (data and context ranks); None is this process alone.

    Returns:
        A scalar with the dtype of `loss_sum`. On a rank without a valid token it is 0, even if `loss_sum` is not
        finite, and still connected to `loss_sum`, so that its backward runs the collectives that the other ranks wait
        for. 0 when no rank has a valid token.

    Raises:
        ValueError: `loss_sum` is not such a scalar; `valid_tokens` is negative or not an integer.

    Cost: one all-reduce of 8 bytes, and one synchronisation when `valid_tokens` is a tensor on an accelerator.

    >>> loss_sum = torch.tensor(6.0, requires_grad=True)
    >>> context_parallel_loss(loss_sum, 4, group=None)
    tensor(1.5000, grad_fn=<DivBackward0>)
    """
    if loss_sum.dim() != 0 or loss_sum.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "loss_sum must be a scalar, float32 or float64, the sum over this rank's valid tokens; "
            f'got {loss_sum.dtype} {list(loss_sum.shape)}: use reduction="sum" on float32 logits'
        )
    count = _checked_count(valid_tokens, loss_sum.device)
    total = all_reduce_sum(count.clone(), group).clamp_(min=1)
    return torch.where(count > 0, loss_sum, torch.zeros_like(loss_sum)) / total


def _checked_count(valid_tokens: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(valid_tokens, Tensor):
        integer = valid_tokens.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if valid_tokens.dim() != 0 or not integer:
            raise ValueError(
                f"valid_tokens must be an integer scalar; got {valid_tokens.dtype} {list(valid_tokens.shape)}: "
                "use valid_token_count(labels)"
            )
        known = not (isinstance(valid_tokens, FakeTensor) or valid_tokens.is_meta)
    elif isinstance(valid_tokens, bool) or not isinstance(valid_tokens, int):
        raise ValueError(f"valid_tokens must be an integer, got {valid_tokens!r}; it counts tokens")
    else:
        known = True
    if known and valid_tokens < 0:
        raise ValueError(f"valid_tokens={int(valid_tokens)} must be 0 or more; it counts tokens")
    return torch.as_tensor(valid_tokens, dtype=torch.int64, device=device)
