from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upipe.layout import (
    document_positions,
    pad_documents,
    padded_length,
    token_range,
    zigzag_multiple,
    zigzag_tokens,
)

few = settings(max_examples=60, deadline=None)


@few
@given(st.integers(1, 500), st.integers(1, 12))
def test_ranges_cover_the_padded_sequence_in_order(tokens, ranks):
    length = padded_length(tokens, ranks)
    assert 0 <= length - tokens < ranks
    ranges = [token_range(length, ranks, rank) for rank in range(ranks)]
    assert list(chain(*ranges)) == list(range(length))
    assert len({len(tokens) for tokens in ranges}) == 1


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 7), st.data())
def test_positions_restart_in_every_document(lengths, padding, data):
    borders = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    padded = pad_documents(borders, borders[-1] + padding)
    truth = [position for length in (*lengths, padding) for position in range(length)]
    start = data.draw(st.integers(0, len(truth)))
    stop = data.draw(st.integers(start, len(truth)))
    ranges = document_positions(padded, range(start, stop))
    assert list(chain(*ranges)) == truth[start:stop]
    assert all(ranges)


def causal(tokens: int) -> set[tuple[int, int]]:
    return {(query, key) for query in range(tokens) for key in range(query + 1)}


def ring_walk(held: list[list[int]]) -> list[set[tuple[int, int]]]:
    """(query, key) pairs that each ring rank computes, given its tokens in the order after the context gather.

    The walk knows blocks, not tokens: causal on its own keys, all queries on the first half of the keys of an earlier
    rank, the second half of the queries on all keys of a later one.
    """
    walks = []
    for rank, queries in enumerate(held):
        half = len(queries) // 2
        pairs = {(queries[row], queries[column]) for row in range(len(queries)) for column in range(row + 1)}
        for source, keys in enumerate(held):
            if source < rank:
                pairs |= {(query, key) for query in queries for key in keys[:half]}
            elif source > rank:
                pairs |= {(query, key) for query in queries[half:] for key in keys}
        walks.append(pairs)
    return walks


def check_zigzag(shard, tokens: int, ring: int, context: int) -> None:
    held = [
        [token for context_rank in range(context) for piece in shard(ring_rank, context_rank) for token in piece]
        for ring_rank in range(ring)
    ]
    sizes = {
        sum(map(len, shard(ring_rank, context_rank))) for ring_rank in range(ring) for context_rank in range(context)
    }
    assert sizes == {tokens // (ring * context)}, "ranks hold unequal numbers of tokens"
    assert sorted(chain(*held)) == list(range(tokens)), "a token is held twice or by nobody"
    walks = ring_walk(held)
    assert sum(map(len, walks)) == len(causal(tokens)), "a pair is computed twice or missed"
    assert set().union(*walks) == causal(tokens), "the visible pairs are not the causal ones"
    assert len({len(walk) for walk in walks}) == 1, "ring ranks have unequal work"
    chunk = tokens // (2 * ring)
    for rank, order in enumerate(held):
        last = 2 * ring - 1 - rank
        own = [*range(rank * chunk, (rank + 1) * chunk), *range(last * chunk, (last + 1) * chunk)]
        assert order == own, "the gather does not give the zigzag order of the ring rank"


geometry = (st.integers(1, 5), st.integers(1, 5), st.integers(1, 2))


@few
@given(*geometry)
def test_zigzag_computes_the_causal_pairs_evenly(ring, context, scale):
    tokens = scale * zigzag_multiple(ring, context)

    def shard(ring_rank, context_rank):
        return zigzag_tokens(tokens, ring, context, ring_rank, context_rank)

    check_zigzag(shard, tokens, ring, context)


def test_the_check_catches_each_chunk_cut_by_context_ranks():
    def shard(ring_rank, context_rank):
        both = (ring_rank, 2 * 2 - 1 - ring_rank)
        return [range(chunk * 6 + context_rank * 2, chunk * 6 + context_rank * 2 + 2) for chunk in both]

    with pytest.raises(AssertionError, match="not the causal ones"):
        check_zigzag(shard, 24, ring=2, context=3)


def test_the_check_catches_context_before_ring():
    def shard(ring_rank, context_rank):
        base = context_rank * 8
        return [range(base + 2 * chunk, base + 2 * chunk + 2) for chunk in (ring_rank, 3 - ring_rank)]

    with pytest.raises(AssertionError, match="not the causal ones"):
        check_zigzag(shard, 24, ring=2, context=3)


def test_the_check_catches_contiguous_blocks():
    with pytest.raises(AssertionError, match=r"computed twice|not the causal ones"):
        check_zigzag(lambda ring_rank, _: [token_range(24, 2, ring_rank)], 24, ring=2, context=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: padded_length(0, 4), "tokens=0 must be at least 1"),
        (lambda: token_range(10, 4, 0), r"tokens=10 must be a multiple of 4 \(ranks\); pad the sequence to 12"),
        (lambda: token_range(12, 4, 4), "rank=4 must be one of 0 to 3"),
        (lambda: pad_documents((0, 5), 4), "borders end at 5, after the padded length 4"),
        (lambda: pad_documents((1, 5), 6), "borders must start at 0"),
        (lambda: document_positions((0, 5, 3), range(2)), "borders must start at 0, never fall"),
        (lambda: document_positions((0, 5), range(4, 6)), r"tokens=range\(4, 6\) must be consecutive and within"),
        (lambda: zigzag_tokens(20, 2, 3, 0, 0), r"multiple of 12 \(ring 2, context 3\); pad the sequence to 24"),
        (lambda: zigzag_tokens(24, 2, 3, 2, 0), "ring_rank=2 must be one of 0 to 1"),
        (lambda: zigzag_tokens(24, 2, 3, 0, 3), "rank=3 must be one of 0 to 2"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
