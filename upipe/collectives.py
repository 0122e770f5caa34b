"""The exchanges between ranks; inside a step no other file calls torch.distributed.

Letters: B batch, S tokens of this rank, T = C*S tokens of the whole sequence, C ranks, D head size.

A sequence-sharded tensor that takes part in an exchange is stored by rank: one flat buffer, one segment
``[B, S, n, D]`` for each rank, n being the heads that rank attends with (n may differ, or be zero). At B = 1 the
segments of one rank's heads, received one after another, are ``[B, T, n, D]`` as they lie, so nothing is permuted
before or after an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in `group`; None is this process alone.

    Raises:
        ValueError: `group` is None although torch.distributed is initialised, or this process is not in `group`.
    """
    if group is None:
        if dist.is_available() and dist.is_initialized():
            raise ValueError(
                "group=None means this process alone, but torch.distributed is initialised with "
                f"{dist.get_world_size()} ranks; pass torch.distributed.group.WORLD, or a group of one rank"
            )
        return 1
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of `group`; pass the group that holds this rank")
    return dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in `group`, 0 for None. Raises as :func:`group_size`."""
    return dist.get_rank(group) if group_size(group) > 1 else 0


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum `tensor` over the ranks in place, without a gradient, and return it."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


@dataclass(frozen=True, eq=False)
class ByRank:
    """Sequence-sharded heads stored by rank.

    Args:
        buffer: flat, contiguous; rank c's segment is ``[B, S, counts[c], D]``.
        counts: heads of each rank.
        batch: B.
        tokens: S.
        head_dim: D.
    """

    buffer: Tensor
    counts: tuple[int, ...]
    batch: int
    tokens: int
    head_dim: int

    @classmethod
    def empty(cls, like: Tensor, counts: Sequence[int], batch: int, tokens: int, head_dim: int) -> ByRank:
        """Allocate with the dtype and device of `like`."""
        buffer = like.new_empty(batch * tokens * sum(counts) * head_dim)
        return cls(buffer, tuple(counts), batch, tokens, head_dim)

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank's segment: the split sizes of the exchange."""
        return [self.batch * self.tokens * count * self.head_dim for count in self.counts]

    def segments(self) -> list[Tensor]:
        """Return a view ``[B, S, counts[c], D]`` for each rank c."""
        pieces = self.buffer.split(self.sizes)
        return [
            piece.view(self.batch, self.tokens, count, self.head_dim)
            for piece, count in zip(pieces, self.counts, strict=True)
        ]

    def write(self, rows: Tensor, tokens: slice, spans: Sequence[slice], first: Sequence[int]) -> None:
        """Write a token tile: ``rows[:, :, spans[c]]`` goes to rank c, from its head ``first[c]`` on.

        Args:
            rows: ``[B, t, heads, D]``.
            tokens: the t tokens of this rank that `rows` holds.
            spans: for each rank, the heads of `rows` that it gets; ranks may share heads.
            first: for each rank, where they start in its segment.
        """
        width = spans[0].stop - spans[0].start
        even = all(
            span == slice(c * width, (c + 1) * width) and self.counts[c] == self.counts[0] and first[c] == first[0]
            for c, span in enumerate(spans)
        )
        if even:  # one strided copy for all ranks
            ranks = len(self.counts)
            target = self.buffer.view(ranks, self.batch, self.tokens, self.counts[0], self.head_dim)
            by_rank = rows.unflatten(2, (ranks, width)).permute(2, 0, 1, 3, 4)  # [C, B, t, n, D]
            target[:, :, tokens, first[0] : first[0] + width].copy_(by_rank)
            return
        for segment, span, start in zip(self.segments(), spans, first, strict=True):
            if span.stop > span.start:
                segment[:, tokens, start : start + span.stop - span.start].copy_(rows[:, :, span])


def sum_heads(pieces: Sequence[Tensor], heads_by_piece: Sequence[Sequence[int]], num_heads: int) -> Tensor:
    """Sum copies of heads in fp32 (fp64 for fp64).

    Args:
        pieces: each ``[B, t, n, D]``.
        heads_by_piece: the heads each piece holds, a run of consecutive ones; a head may be in several pieces.
        num_heads: heads of the result.

    Returns:
        ``[B, t, num_heads, D]`` in the dtype of the sum.
    """
    batch, tokens, _, head_dim = pieces[0].shape
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    total = torch.zeros(batch, tokens, num_heads, head_dim, dtype=wide, device=pieces[0].device)
    for piece, heads in zip(pieces, heads_by_piece, strict=True):
        if heads:
            total[:, :, heads[0] : heads[-1] + 1].add_(piece)
    return total


def seq_to_head(shards: ByRank, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange sequence-sharded heads for head-sharded tokens: every rank receives its heads of all tokens.

    Args:
        shards: this rank's S tokens of all heads, stored by rank. The counts must be the same on all ranks.
        group: the C ranks.

    Returns:
        ``[B, T, counts[rank], D]``, contiguous. Without other ranks it is a view of `shards`.

    Cost: sends and receives one segment to and from each rank; at B > 1 one permuted copy.
    """
    ranks, rank = group_size(group), group_rank(group)
    count = shards.counts[rank]
    if ranks == 1:
        return shards.segments()[0]
    shape = (ranks, shards.batch, shards.tokens, count, shards.head_dim)
    received = shards.buffer.new_empty(shape)
    segment = received[0].numel()
    _all_to_all(received.view(-1), shards.buffer, [segment] * ranks, shards.sizes, group)
    del shards
    # [C, B, S, n, D] -> [B, T, n, D]; a view at B = 1
    return received.transpose(0, 1).reshape(shape[1], ranks * shape[2], count, shape[4])


def head_to_seq(heads: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> ByRank:
    """Exchange head-sharded tokens for sequence-sharded heads: the inverse of :func:`seq_to_head`.

    Args:
        heads: ``[B, T, counts[rank], D]``.
        counts: heads of each rank, the same on all ranks.
        group: the C ranks.

    Returns:
        This rank's S tokens of all heads, stored by rank. Without other ranks it shares memory with `heads`.

    Cost: as :func:`seq_to_head`.
    """
    ranks = group_size(group)
    batch, whole, count, head_dim = heads.shape
    if ranks == 1:
        return ByRank(heads.contiguous().view(-1), tuple(counts), batch, whole, head_dim)
    # [B, T, n, D] -> [C, B, S, n, D]; contiguous as it is at B = 1
    send = heads.view(batch, ranks, whole // ranks, count, head_dim).transpose(0, 1).contiguous().view(-1)
    del heads
    shards = ByRank.empty(send, counts, batch, whole // ranks, head_dim)
    _all_to_all(shards.buffer, send, shards.sizes, [send.numel() // ranks] * ranks, group)
    return shards


def _all_to_all(
    received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: dist.ProcessGroup | None
) -> None:
    # gloo and the fake group check none of this: a strided buffer gets wrong data in silence.
    assert received.is_contiguous()
    assert sent.is_contiguous()
    assert received.numel() == sum(received_sizes)
    assert sent.numel() == sum(sent_sizes)
    assert received.dtype == sent.dtype
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
