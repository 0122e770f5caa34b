from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from upipe.batch import shard_batch
from upipe.loss import context_parallel_loss, valid_token_count
from upipe.testing import RankError, assert_exact, run_ranks

IGNORED = -100
VOCAB, HIDDEN, BATCH, TOKENS = 17, 6, 2, 23


class TokenModel(torch.nn.Module):
    """A model of tokens and positions: what crosses ranks is the labels, the positions and the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.position = torch.nn.Embedding(TOKENS + 5, HIDDEN, dtype=torch.float64)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        hidden = torch.tanh(self.token(batch["input_ids"]) + self.position(batch["position_ids"]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.named_parameters()}


def micro_batches(count: int) -> list[dict[str, Tensor]]:
    """Rows with very unequal numbers of valid labels; the last rank of 2, 3 and 4 has none in the first batch."""
    generator = torch.Generator().manual_seed(count)
    batches = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2 + 0.2 * index, IGNORED)
        if index == 0:
            labels[:, TOKENS // 2 :] = IGNORED
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def truth(batches: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """One process, all batches at once, the mean over valid tokens, labels shifted by hand."""
    model = TokenModel()
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    hidden = torch.tanh(model.token(ids[:, :-1]) + model.position(torch.arange(TOKENS - 1)))
    loss = F.cross_entropy(model.head(hidden).flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.item(), model.gradients()


def shard_here(batch: dict[str, Tensor]) -> dict[str, Any]:
    return shard_batch(batch, group=dist.group.WORLD)


def shift_after_the_cut(batch: dict[str, Tensor]) -> dict[str, Any]:
    shard = shard_here({"input_ids": batch["input_ids"], "shift_labels": batch["labels"]})
    own = shard["labels"]
    return {**shard, "labels": torch.cat([own[:, 1:], torch.full_like(own[:, :1], IGNORED)], dim=1)}


def mean_of_means(loss_sum: Tensor, valid_tokens: int | Tensor, group: dist.ProcessGroup) -> Tensor:
    """The usual defect: every rank divides by its own tokens, then ranks are averaged."""
    return loss_sum / max(int(valid_tokens), 1) / dist.get_world_size(group)


def train_here(
    batches: list[dict[str, Tensor]], sharder: Callable[..., dict[str, Any]], loss: Callable[..., Tensor]
) -> tuple[float, dict[str, Tensor], int]:
    """One optimizer step's gradients: backward on each micro-batch, then a sum over ranks."""
    group = dist.group.WORLD
    model = TokenModel()
    shards = [sharder(batch) for batch in batches]
    valid_tokens = torch.stack([valid_token_count(shard["labels"]) for shard in shards]).sum()
    logged = torch.zeros((), dtype=torch.float64)
    for shard in shards:
        share = loss(model.loss_sum(shard), valid_tokens, group)
        share.backward()
        logged += share.detach()
    for value in (logged, *model.gradients().values()):
        dist.all_reduce(value, group=group)
    return logged.item(), model.gradients(), int(valid_tokens)


def check_parity(ranks: int, accumulation: int, sharder=shard_here, loss=context_parallel_loss) -> None:
    batches = micro_batches(accumulation)
    results = run_ranks(train_here, ranks, batches, sharder, loss)
    if accumulation == 1:
        assert results[-1][2] == 0, "the case of a rank without valid tokens is gone"
    true_loss, true_gradients = truth(batches)
    for logged, gradients, _ in results:
        assert logged == pytest.approx(true_loss, rel=1e-12), "the loss differs from one process"
        for name, gradient in true_gradients.items():
            whole = torch.zeros_like(gradient) if gradients[name] is None else gradients[name]
            assert_exact(whole, gradient, name, tolerance=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_and_loss_equal_one_process(ranks, accumulation):
    check_parity(ranks, accumulation)


def test_the_check_catches_labels_shifted_after_the_cut():
    with pytest.raises(AssertionError, match="differs"):
        check_parity(3, 2, sharder=shift_after_the_cut)


def test_the_check_catches_a_mean_of_means():
    with pytest.raises(AssertionError, match="differs"):
        check_parity(3, 2, loss=mean_of_means)


def rank_without_tokens(bad: float) -> tuple[float, float]:
    """Rank 1 has no valid token and a loss that is not finite; returns its share and its gradient."""
    empty = dist.get_rank() == 1
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss_sum = weight * 3 + (bad if empty else 0.0)
    share = context_parallel_loss(loss_sum, 0 if empty else 4, dist.group.WORLD)
    assert share.requires_grad  # its backward runs whatever collectives the model has
    share.backward()
    return share.item(), weight.grad.item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_rank_without_valid_tokens_adds_exactly_zero(bad):
    assert run_ranks(rank_without_tokens, 2, bad) == [(1.5, 0.75), (0.0, 0.0)]


def count_here(counts: list[Any]) -> float:
    return context_parallel_loss(torch.tensor(6.0), counts[dist.get_rank()], dist.group.WORLD).item()


def test_counts_are_summed_as_int64():
    assert run_ranks(count_here, 2, [0, 0]) == [0.0, 0.0]
    small = torch.tensor(100, dtype=torch.int8)
    assert run_ranks(count_here, 3, [small, 100, small]) == [pytest.approx(6 / 300)] * 3
    assert run_ranks(count_here, 2, [2**24 + 1, 2**33]) == [pytest.approx(6 / (2**24 + 2**33 + 1))] * 2


def test_the_count_that_is_passed_is_not_written():
    for ranks in (1, 2):
        assert run_ranks(count_is_kept_here, ranks) == [5] * ranks


def count_is_kept_here() -> int:
    count = torch.tensor(5)
    context_parallel_loss(torch.tensor(1.0), count, dist.group.WORLD)
    return int(count)


def test_one_process_and_fake_tensors():
    loss_sum = torch.tensor(6.0, requires_grad=True)
    share = context_parallel_loss(loss_sum, torch.tensor(4, dtype=torch.int32), None)
    share.backward()
    assert (share.item(), loss_sum.grad.item()) == (1.5, 0.25)
    assert context_parallel_loss(torch.tensor(0.0), 0, None).item() == 0.0
    with FakeTensorMode():
        labels = torch.empty(2, 3, dtype=torch.int64)
        fake = context_parallel_loss(torch.empty((), dtype=torch.float32), valid_token_count(labels), None)
    assert fake.shape == ()


def test_valid_token_count():
    labels = torch.tensor([[1, IGNORED, 3], [IGNORED, 0, 7]])
    assert valid_token_count(labels).item() == 4
    assert valid_token_count(labels, ignore_index=0).item() == 5
    assert valid_token_count(labels).dtype == torch.int64


@pytest.mark.parametrize(
    ("loss_sum", "valid_tokens", "message"),
    [
        (torch.ones(1), 1, r"loss_sum must be a scalar, .* got torch.float32 \[1\]"),
        (torch.tensor(1.0).bfloat16(), 1, "got torch.bfloat16"),
        (torch.tensor(1), 1, "got torch.int64"),
        (torch.tensor(1.0), -1, "valid_tokens=-1 must be 0 or more"),
        (torch.tensor(1.0), torch.tensor(-3), "valid_tokens=-3 must be 0 or more"),
        (torch.tensor(1.0), 2.0, "valid_tokens must be an integer, got 2.0"),
        (torch.tensor(1.0), True, "valid_tokens must be an integer, got True"),
        (torch.tensor(1.0), torch.tensor(2.0), "valid_tokens must be an integer scalar; got torch.float32"),
        (torch.tensor(1.0), torch.tensor([2]), r"got torch.int64 \[1\]: use valid_token_count"),
    ],
)
def test_what_is_refused(loss_sum, valid_tokens, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_loss(loss_sum, valid_tokens, None)


def no_group_here() -> None:
    context_parallel_loss(torch.tensor(1.0), 1, None)


def test_no_group_is_refused_where_there_are_ranks():
    with pytest.raises(RankError, match="WORLD"):
        run_ranks(no_group_here, 2)
