"""The stage loops of Untied Ulysses: forward over all stages, and backward that recomputes a stage as it goes.

A stage projects U heads, exchanges them for tokens, attends, and exchanges the output back; its buffers are gone before
the next one begins. Recompute issues the exchanges of the forward, in the same order on every rank.

Reference: arXiv 2602.21196. Letters: B batch, S tokens of this rank, T tokens of the whole sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from upipe.collectives import ByRank, head_to_seq, seq_to_head
from upipe.local_attention import HeldKV, KVGradients
from upipe.memory.label import label
from upipe.rank_pass import HeadsByRank, RankPass

# A stage's attention output, sequence-sharded, and its log-sum-exp ``[B, heads of this rank, T]``.
Attended = tuple[ByRank, Tensor]


def forward_stages(rank: RankPass) -> list[Attended]:
    """Attend with all heads, a stage at a time; return output and log-sum-exp of every stage."""
    layer, attended = rank.layer, []
    held: HeldKV = {}
    for index in range(len(layer.schedule.stages)):
        rank.receive_kv(index, held)
        q = rank.receive_q(index)
        with label("attn.out"):
            out, lse = layer.local.forward(index, q, held)
            del q
            attended.append((head_to_seq(out, rank.query_counts(index), layer.group), lse))
            del out
        held = layer.local.still_needed(index, held)
    return attended


def backward_stages(
    rank: RankPass,
    kept: list[Attended] | None,
    output_gradient: Callable[[int, ByRank], ByRank],
    dsinks: Tensor | None,
) -> tuple[list[ByRank], list[tuple[ByRank, HeadsByRank]]]:
    """Recompute a stage and run its backward at once, stage by stage.

    Args:
        rank: the pass.
        kept: what :func:`forward_stages` returned, taken out of the list stage by stage; None attends again.
        output_gradient: from a stage and its output, sequence-sharded, to the gradient of that output.
        dsinks: gradient of the sinks, filled in; None for none.

    Returns:
        dq of every stage; dk with dv of every stage in which KV heads were done, and these heads by rank. All
        sequence-sharded.
    """
    layer, held, dkv = rank.layer, HeldKV(), KVGradients(rank.layer.schedule, rank.layer.local.rank)
    dq_shards: list[ByRank] = []
    dkv_shards: list[tuple[ByRank, HeadsByRank]] = []
    for index in range(len(layer.schedule.stages)):
        rank.receive_kv(index, held)
        q = rank.receive_q(index)
        if kept is None:
            with label("attn.out"):
                out, lse = layer.local.forward(index, q, held)
                out_shards = head_to_seq(out, rank.query_counts(index), layer.group)
            dout_shards = output_gradient(index, out_shards)
        else:
            out_shards, lse = kept.pop(0)
            dout_shards = output_gradient(index, out_shards)
            with label("attn.out"):
                out = seq_to_head(out_shards, layer.group)
        del out_shards
        with label("attn.dout"):
            dout = seq_to_head(dout_shards, layer.group)
            del dout_shards
        if dsinks is not None:
            layer.local.sink_gradient(index, dout, out, lse, dsinks)
        with label("attn.dqkv"):
            dq, found = layer.local.backward(index, dout, q, held, out, lse)
            del q, out, lse, dout
            while found:
                dkv.add(index, found.pop(0))
            dq_shards.append(head_to_seq(dq, rank.query_counts(index), layer.group))
            done = layer.schedule.done_kv_heads(index)
            if any(done):
                packed = dkv.take(done[layer.local.rank], dq).flatten(2, 3)
                dkv_shards.append((head_to_seq(packed, [2 * len(heads) for heads in done], layer.group), done))
                del packed
            del dq
        held = layer.local.still_needed(index, held)
    return dq_shards, dkv_shards
