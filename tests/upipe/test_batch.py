from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from upipe import layout
from upipe.batch import shard_batch
from upipe.mask import AttentionMask
from upipe.testing import RankError, lone_rank, run_ranks

IGNORED = -100


def shard_here(batch: dict[str, Any], pad_to: int | None) -> dict[str, Any]:
    return shard_batch(batch, group=dist.group.WORLD, pad_to=pad_to)


def refused_here(batch: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        shard_batch(batch, group=dist.group.WORLD)
    return str(caught.value)


def no_group_here() -> str:
    with pytest.raises(ValueError, match="WORLD") as caught:
        shard_batch({"input_ids": torch.ones(1, 2)}, group=None)
    return str(caught.value)


def gather(shards: list[dict[str, Any]], name: str, dim: int = 1) -> Tensor:
    return torch.cat([shard[name] for shard in shards], dim=dim)


def random_batch(batch: int = 2, tokens: int = 11) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    ids = torch.randint(1, 50, (batch, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(("ranks", "pad_to"), [(2, None), (3, None), (4, 20)])
def test_ranks_hold_the_whole_batch_shifted_once(ranks, pad_to):
    batch = random_batch()
    batch["loss_weight"] = torch.rand(2, 11, 3)
    batch["is_code"] = torch.rand(2, 11) > 0.5
    batch["pixel_values"] = torch.rand(2, 5)
    batch["name"] = "book"
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
    shards = run_ranks(shard_here, ranks, batch, pad_to)

    length = pad_to or layout.padded_length(11, ranks)
    assert {shard["input_ids"].shape for shard in shards} == {(2, length // ranks)}
    padding = length - 11
    assert gather(shards, "input_ids").tolist() == [[*row, *[0] * padding] for row in batch["input_ids"].tolist()]
    assert gather(shards, "labels").tolist() == [
        [*row[1:], IGNORED, *[IGNORED] * padding] for row in batch["labels"].tolist()
    ]
    assert gather(shards, "position_ids").tolist() == [list(range(length))] * 2
    for name in ("loss_weight", "is_code"):
        whole = gather(shards, name)
        assert whole.dtype == batch[name].dtype
        assert torch.equal(whole[:, :11], batch[name])
        assert not whole[:, 11:].any()
    assert all(torch.equal(shard["pixel_values"], batch["pixel_values"]) for shard in shards)
    assert all(shard["name"] == "book" for shard in shards)
    assert all(torch.equal(batch[name], value) for name, value in before.items()), "the batch was written"


def test_documents_predict_within_themselves():
    batch = random_batch(1, 13)
    batch["cu_seqlens"] = torch.tensor([0, 4, 4, 9, 13], dtype=torch.int32)
    shards = run_ranks(shard_here, 3, batch, None)
    row = batch["labels"][0].tolist()
    expected = [*row[1:4], IGNORED, *row[5:9], IGNORED, *row[10:13], IGNORED, IGNORED, IGNORED]
    assert gather(shards, "labels").tolist() == [expected]
    assert gather(shards, "position_ids").tolist() == [[*range(4), *range(5), *range(4), *range(2)]]
    for shard in shards:
        assert shard["cu_seqlens"].dtype == torch.int32
        assert shard["cu_seqlens"].tolist() == [0, 4, 4, 9, 13, 15]
        AttentionMask(cu_seqlens=shard["cu_seqlens"]).check(batch=1, tokens=15, num_heads=2)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_given_positions_are_kept_and_continued(by_row, packed):
    batch = random_batch(1 if packed else 2, 6)
    rows = torch.tensor([[5, 6, 7, 8, 9, 20], [1, 2, 3, 4, 5, 6]])[: 1 if packed else 2]
    batch["position_ids"] = rows if by_row else rows[0]
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 2, 6], dtype=torch.int32)
    shards = run_ranks(shard_here, 4, batch, 16)  # a rank holds padding only
    whole = gather(shards, "position_ids", dim=-1)
    added = [list(range(10))] if packed else [list(range(21, 31)), list(range(7, 17))]
    expected = [[*row, *more] for row, more in zip(rows.tolist(), added, strict=True)]
    assert whole.tolist() == (expected if by_row else expected[0])


def test_right_padding_is_masked_and_dropped():
    batch = random_batch(2, 6)
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    shard = shard_batch({**batch, "attention_mask": real}, group=None)
    assert "attention_mask" not in shard
    first, second = batch["labels"].tolist()
    assert shard["labels"].tolist() == [[*first[1:4], IGNORED, IGNORED, IGNORED], [*second[1:], IGNORED]]

    shifted = {"input_ids": batch["input_ids"], "shift_labels": batch["labels"], "attention_mask": real.bool()}
    shard = shard_batch(shifted, group=None)
    assert "shift_labels" not in shard
    # A label after the last token of a full row is the data set's own and stays.
    assert shard["labels"].tolist() == [[*first[:3], IGNORED, IGNORED, IGNORED], second]

    shard = shard_batch({**batch, "attention_mask": torch.ones(2, 6)}, group=None)
    assert "attention_mask" not in shard


def test_shifted_labels_pass_and_no_labels_are_made():
    batch = random_batch(2, 6)
    shard = shard_batch({"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}, group=None, pad_to=8)
    assert shard["labels"][:, :6].tolist() == batch["labels"].tolist()
    assert shard["labels"][:, 6:].tolist() == [[IGNORED] * 2] * 2
    shard = shard_batch({"input_ids": batch["input_ids"], "labels": None, "attention_mask": None}, group=None)
    assert set(shard) == {"input_ids", "position_ids"}


def test_shards_do_not_keep_the_batch_alive():
    batch = random_batch(1, 8) | {"position_ids": torch.arange(8), "mask": torch.ones(1, 8, 2, dtype=torch.bool)}
    for shard in (*run_ranks(shard_here, 2, batch, None), shard_batch(batch, group=None)):
        for name, value in shard.items():
            assert value.is_contiguous(), name
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
    assert shard["input_ids"].data_ptr() != batch["input_ids"].data_ptr()


def test_a_lone_rank_is_the_same_as_no_group():
    batch = random_batch(2, 7)
    alone = shard_batch(batch, group=None)
    with lone_rank() as group:
        grouped = shard_batch(batch, group=group)
    assert set(alone) == set(grouped)
    assert all(torch.equal(alone[name], grouped[name]) for name in alone)


def test_no_group_is_refused_where_there_are_ranks():
    messages = run_ranks(no_group_here, 2)
    assert messages[0] == messages[1]


def labels_shifted_after_the_cut(batch: dict[str, Any], pad_to: int | None) -> dict[str, Any]:
    """The defect this file is about: every rank shifts its own labels, so the token at each border predicts nothing."""
    shard = shard_here({"input_ids": batch["input_ids"], "shift_labels": batch["labels"]}, pad_to)
    own = shard["labels"]
    return {**shard, "labels": torch.cat([own[:, 1:], torch.full_like(own[:, :1], IGNORED)], dim=1)}


def positions_from_zero_on_each_rank(batch: dict[str, Any], pad_to: int | None) -> dict[str, Any]:
    shard = shard_here(batch, pad_to)
    return {**shard, "position_ids": torch.arange(shard["input_ids"].shape[1])[None]}


def check_neighbours(sharder) -> None:
    """What depends on the token before or after is the same on 3 ranks as on one."""
    batch = random_batch(1, 12)
    shards = run_ranks(sharder, 3, batch, None)
    whole = shard_batch(batch, group=None)
    for name in ("labels", "position_ids"):
        assert torch.equal(gather(shards, name), whole[name]), f"{name} differ between 3 ranks and one"


def test_neighbours_across_ranks():
    check_neighbours(shard_here)
    with pytest.raises(AssertionError, match="labels differ"):
        check_neighbours(labels_shifted_after_the_cut)
    with pytest.raises(AssertionError, match="position_ids differ"):
        check_neighbours(positions_from_zero_on_each_rank)


BORDERS = torch.tensor([0, 3, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, r'batch\["input_ids"\] must be a tensor \[B, T\]'),
        ({"input_ids": torch.ones(6)}, r"got \[6\]"),
        ({"shift_labels": torch.ones(1, 6)}, "has labels and shift_labels"),
        ({"labels": torch.ones(1, 5).long()}, r'batch\["labels"\] must be \[1, 6\], as input_ids; got \[1, 5\]'),
        ({"labels": [1, 2]}, "got list"),
        ({"labels": torch.ones(1, 6)}, r'batch\["labels"\] must be signed integers; got torch.float32'),
        ({"position_ids": torch.ones(3, 1, 6).long()}, r'batch\["position_ids"\] must be \[1, 6\] or \[6\]'),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r'batch\["attention_mask"\] must be \[1, 6\]'),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "padding on the left or holes.*cu_seqlens"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 0]])}, "padding on the left or holes"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])}, "1 and 0 only; for packed documents pass cu_seqlens"),
        ({"cu_seqlens": BORDERS.long()}, "cu_seqlens must be int32"),
        ({"cu_seqlens": BORDERS[:2]}, "cu_seqlens ends at 3 but input_ids has 6 tokens"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        shard_batch(random_batch(1, 6) | change, group=None)


def test_lengths_and_batches_that_do_not_fit():
    with pytest.raises(ValueError, match="cu_seqlens needs batch size 1, got 2; pack the rows"):
        shard_batch(random_batch(2, 6) | {"cu_seqlens": BORDERS}, group=None)
    with pytest.raises(ValueError, match=r"pad_to=5 must be a multiple of 1 \(ranks\) and hold the 6 tokens"):
        shard_batch(random_batch(1, 6), group=None, pad_to=5)
    with pytest.raises(RankError, match=r"pad_to=10 must be a multiple of 4 .* valid: 8, 12, \.\.\."):
        run_ranks(shard_here, 4, random_batch(1, 6), 10)
    messages = run_ranks(refused_here, 3, random_batch(1, 6) | {"labels": torch.ones(1, 4).long()})
    assert len(set(messages)) == 1, "ranks refuse with different words"
