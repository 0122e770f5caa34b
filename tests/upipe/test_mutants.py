"""Defects that people ship, put into the code one at a time: the exactness check must name what each one spoils."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.upipe.cases import Case, check
from upipe import headwise, local_attention, projections, rank_pass, ulysses
from upipe.collectives import ByRank
from upipe.kernels import Kernel
from upipe.local_attention import KVGradients, LocalAttention
from upipe.projections import TileSum
from upipe.testing import RankError, run_ranks

Patch = AbstractContextManager[Any]
BASE = Case(batch=2, num_heads=12, num_kv_heads=4, heads_per_stage=4, head_dim=4, hidden=7)
SHARED_KV = replace(BASE, num_kv_heads=1)
TWO_ARRIVALS = replace(BASE, num_heads=8, num_kv_heads=4, heads_per_stage=2)
NO_DX = replace(BASE, frozen=("x",))


def kv_heads_of_the_next_rank() -> Patch:
    """Queries paired with another KV head: what the released code does to pretrained GQA models."""
    project = rank_pass.RankPass._project

    def mispaired(self, heads_by_rank, names):
        return project(self, heads_by_rank if names == ("q",) else [*heads_by_rank[1:], heads_by_rank[0]], names)

    return mock.patch.object(rank_pass.RankPass, "_project", mispaired)


def kv_gradients_twice() -> Patch:
    backward = LocalAttention.backward

    def twice(self, *args):
        dq, found = backward(self, *args)
        return dq, [(heads, 2 * dk, 2 * dv) for heads, dk, dv in found]

    return mock.patch.object(LocalAttention, "backward", twice)


def kv_gradients_of_the_last_stage_only() -> Patch:
    add = KVGradients.add

    def overwrite(self, index, gradient):
        for head in gradient[0]:
            self._sums.pop(head, None)
        add(self, 0, gradient)

    return mock.patch.object(KVGradients, "add", overwrite)


def weight_gradient_of_rank_one_dropped() -> Patch:
    result = TileSum.result
    return mock.patch.object(TileSum, "result", lambda self, dtype: result(self, dtype) * (dist.get_rank() != 1))


def last_copy_wins(pieces, heads_by_piece, num_heads):
    batch, tokens, _, head_dim = pieces[0].shape
    total = pieces[0].new_zeros(batch, tokens, num_heads, head_dim)
    for piece, heads in zip(pieces, heads_by_piece, strict=True):
        if heads:
            total[:, :, heads[0] : heads[-1] + 1] = piece
    return total


def copies_of_kv_heads_not_summed() -> Patch:
    return mock.patch.object(rank_pass, "sum_heads", last_copy_wins)


def copies_of_kv_heads_not_summed_by_ulysses() -> Patch:
    return mock.patch.object(ulysses, "sum_heads", last_copy_wins)


def sinks_of_the_first_heads_everywhere() -> Patch:
    def first_heads(self, index, heads):
        return self.mask.with_sinks(self.mask.sinks[heads])

    return mock.patch.object(LocalAttention, "_mask", first_heads)


def sinks_forgotten() -> Patch:
    return mock.patch.object(LocalAttention, "_mask", lambda self, index, heads: self.mask.with_sinks(None))


def sink_gradient_of_every_rank_at_the_front() -> Patch:
    def at_the_front(self, index, dout, out, lse, dsinks):
        count = out.shape[2]
        part = self.mask.sinks[:count]
        dsinks[:count] = local_attention.sink_gradient(part, dout, out, lse)

    return mock.patch.object(LocalAttention, "sink_gradient", at_the_front)


def positions_from_zero_on_every_rank() -> Patch:
    return mock.patch.object(headwise, "_positions", lambda x, *rest: torch.arange(x.shape[1]))


def positions_of_the_first_row_for_all() -> Patch:
    return mock.patch.object(headwise, "_positions", lambda x, positions, *rest: positions[0])


def output_in_the_order_of_stages() -> Patch:
    def by_stage(shards):
        return [segment for piece in shards for segment in piece.segments()]

    return mock.patch.object(rank_pass, "natural_order", by_stage)


def exchange_buffer_read_before_it_arrives() -> Patch:
    """A stage that reads what the stage before left in the buffer."""
    exchange, last = rank_pass.seq_to_head, {}

    def stale(shards, group):
        received = exchange(shards, group)
        return last.setdefault(received.shape, received)

    return mock.patch.object(rank_pass, "seq_to_head", stale)


def last_token_of_a_tile_not_written() -> Patch:
    write = ByRank.write

    def short(self, rows, tokens, spans, first):
        write(self, rows[:, :-1], slice(tokens.start, tokens.stop - 1), spans, first)

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that nothing is right by luck
    return mock.patch.object(ByRank, "write", short)


def window_ignored() -> Patch:
    mask = LocalAttention._mask
    return mock.patch.object(LocalAttention, "_mask", lambda self, *args: replace(mask(self, *args), window=None))


def documents_ignored() -> Patch:
    mask = LocalAttention._mask
    return mock.patch.object(LocalAttention, "_mask", lambda self, *args: replace(mask(self, *args), cu_seqlens=None))


def softcap_ignored_in_backward() -> Patch:
    backward = Kernel.backward

    def uncapped(self, *args):
        *tensors, mask, scale = args
        return backward(self, *tensors, replace(mask, softcap=None), scale)

    return mock.patch.object(Kernel, "backward", uncapped)


def rotary_not_undone_in_backward() -> Patch:
    return mock.patch.object(projections, "rotate_transposed", lambda grad, cos, sin: grad)


def only_the_first_tile_counts() -> Patch:
    add = TileSum.add
    return mock.patch.object(TileSum, "add", lambda self, value: self._count or add(self, value))


def kv_arrivals_mixed_up() -> Patch:
    """K and V of the first arrival for every call, as if a KV head came once for all."""

    def first(self, held, arrival, heads):
        k, v = held[min(held)]
        return k[:, :, heads], v[:, :, heads]

    still = LocalAttention.still_needed

    def keep(self, index, held):
        return {min(held): held[min(held)], **still(self, index, held)}

    return mock.patch.multiple(LocalAttention, _kv=first, still_needed=keep)


def gradient_of_kept_output_from_another_stage() -> Patch:
    by_rank = rank_pass.RankPass.by_rank
    kept: list[Any] = []

    def first(self, buffer, counts):
        kept.append(buffer)
        return by_rank(self, kept[0], counts)

    return mock.patch.object(rank_pass.RankPass, "by_rank", first)


# Mutant, method, case that shows it, the quantity whose check fails first.
MUTANTS: list[tuple[Callable[[], Patch], str, Case, str]] = [
    (kv_heads_of_the_next_rank, "upipe", BASE, "y"),
    (kv_gradients_twice, "upipe", BASE, "x"),
    (kv_gradients_twice, "upipe", NO_DX, "k"),
    (kv_gradients_twice, "ulysses", NO_DX, "k"),
    (kv_gradients_of_the_last_stage_only, "upipe", NO_DX, "k"),
    (weight_gradient_of_rank_one_dropped, "upipe", BASE, "q"),
    (copies_of_kv_heads_not_summed, "upipe", SHARED_KV, "x"),
    (copies_of_kv_heads_not_summed, "upipe", replace(SHARED_KV, frozen=("x",)), "k"),
    (copies_of_kv_heads_not_summed_by_ulysses, "ulysses", replace(SHARED_KV, frozen=("x",)), "k"),
    (sinks_of_the_first_heads_everywhere, "upipe", replace(BASE, sinks=True), "y"),
    (sinks_of_the_first_heads_everywhere, "ulysses", replace(BASE, sinks=True), "y"),
    (sinks_forgotten, "upipe", replace(BASE, sinks=True), "y"),
    (sink_gradient_of_every_rank_at_the_front, "upipe", replace(BASE, sinks=True), "sinks"),
    (sink_gradient_of_every_rank_at_the_front, "ulysses", replace(BASE, sinks=True), "sinks"),
    (positions_from_zero_on_every_rank, "upipe", replace(BASE, causal=False), "y"),
    (positions_of_the_first_row_for_all, "upipe", replace(BASE, row_positions=True), "y"),
    (output_in_the_order_of_stages, "upipe", BASE, "y"),
    (exchange_buffer_read_before_it_arrives, "upipe", BASE, "y"),
    (last_token_of_a_tile_not_written, "upipe", BASE, "y"),
    (window_ignored, "upipe", replace(BASE, window=3), "y"),
    (documents_ignored, "upipe", replace(BASE, batch=1, documents=(300, 700)), "y"),
    (softcap_ignored_in_backward, "upipe", replace(BASE, softcap=0.7), "x"),
    (rotary_not_undone_in_backward, "upipe", NO_DX, "q"),
    (only_the_first_tile_counts, "upipe", BASE, "q"),
    (kv_arrivals_mixed_up, "upipe", TWO_ARRIVALS, "y"),
    (gradient_of_kept_output_from_another_stage, "upipe", replace(BASE, keep_attention=True), "x"),
]


def check_mutant(index: int) -> None:
    mutant, method, case, _ = MUTANTS[index]
    with mock.patch.multiple(rank_pass, MIN_TILE_TOKENS=1, TILE_SHARE=2):
        try:
            check(case, method)
        except AssertionError as error:
            raise RuntimeError("the code is wrong without the mutant") from error
        with mutant():
            check(case, method)


@pytest.mark.parametrize(
    "index", range(len(MUTANTS)), ids=[f"{m.__name__}-{method}-{name}" for m, method, _, name in MUTANTS]
)
def test_mutant_is_caught(index):
    quantity = MUTANTS[index][3]
    with pytest.raises(RankError, match=rf"(?s)AssertionError: {quantity} of Case.*differs by") as caught:
        run_ranks(check_mutant, 2, index)
    assert "without the mutant" not in str(caught.value)
