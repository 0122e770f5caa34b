"""Which tokens a rank owns: index arithmetic in plain integers, no torch.

Letters: T tokens of the whole sequence, C context-parallel ranks, R ring ranks.

A sequence is contiguous over the C ranks: rank r owns tokens r*S to r*S + S - 1. Under a ring it is cut in two steps.
First over the ring, in 2R chunks of which ring rank r owns r and 2R-1-r, so that all ring ranks have the same number of
causal pairs. Then each ring rank's two chunks, end to end, are cut over its C context ranks. In this order, and only in
this one, the gather over the context ranks gives the ring rank's chunks back as they were, without a permutation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def padded_length(tokens: int, ranks: int) -> int:
    """Return the least multiple of `ranks` that holds `tokens`.

    Raises:
        ValueError: a count is below one.

    >>> padded_length(10, 4), padded_length(12, 4)
    (12, 12)
    """
    _check_counts(tokens=tokens, ranks=ranks)
    return -(-tokens // ranks) * ranks


def token_range(tokens: int, ranks: int, rank: int) -> range:
    """Return the contiguous tokens of `rank`: ``rank * S`` up to ``rank * S + S``, with S = tokens / ranks.

    Raises:
        ValueError: `tokens` is not a multiple of `ranks`, or `rank` is not one of them.

    >>> token_range(12, 3, 1)
    range(4, 8)
    >>> token_range(10, 4, 1)
    Traceback (most recent call last):
    ValueError: tokens=10 must be a multiple of 4 (ranks); pad the sequence to 12
    """
    if padded_length(tokens, ranks) != tokens:
        raise ValueError(
            f"tokens={tokens} must be a multiple of {ranks} (ranks); pad the sequence to {padded_length(tokens, ranks)}"
        )
    _check_rank("rank", rank, ranks)
    share = tokens // ranks
    return range(rank * share, (rank + 1) * share)


def pad_documents(borders: Sequence[int], length: int) -> tuple[int, ...]:
    """Extend document borders to `length`, the padding being a document of its own.

    Args:
        borders: ``documents + 1`` integers from 0 to the number of tokens.
        length: tokens with padding.

    Raises:
        ValueError: borders that do not start at 0, fall, or end after `length`.

    >>> pad_documents((0, 3, 10), 12)
    (0, 3, 10, 12)
    >>> pad_documents((0, 3, 10), 10)
    (0, 3, 10)
    """
    _check_borders(borders)
    if borders[-1] > length:
        raise ValueError(
            f"borders end at {borders[-1]}, after the padded length {length}; pad to {borders[-1]} or more"
        )
    return tuple(borders) if borders[-1] == length else (*borders, length)


def document_positions(borders: Sequence[int], tokens: range) -> tuple[range, ...]:
    """Return the positions of consecutive tokens, counted from the start of each document: one range a document.

    Args:
        borders: ``documents + 1`` integers from 0 to the number of tokens; empty documents are allowed.
        tokens: tokens of the whole sequence, step 1, for instance those of a rank.

    Raises:
        ValueError: borders that do not start at 0 or fall, or tokens outside them.

    >>> document_positions((0, 3, 10), range(2, 6))  # the end of the first document, the start of the second
    (range(2, 3), range(0, 3))
    """
    _check_borders(borders)
    if tokens.step != 1 or (tokens and (tokens.start < 0 or tokens.stop > borders[-1])):
        raise ValueError(f"tokens={tokens} must be consecutive and within the borders, 0 to {borders[-1]}")
    positions = []
    token, document = tokens.start, bisect_right(borders, tokens.start) - 1
    while token < tokens.stop:
        stop = min(tokens.stop, borders[document + 1])
        if stop > token:
            positions.append(range(token - borders[document], stop - borders[document]))
        token, document = stop, document + 1
    return tuple(positions)


def zigzag_multiple(ring: int, context: int) -> int:
    """Return what the number of tokens must be a multiple of for :func:`zigzag_tokens`: R * lcm(2, C).

    >>> padded_length(50, zigzag_multiple(ring=4, context=3))
    72
    """
    _check_counts(ring=ring, context=context)
    return ring * math.lcm(2, context)


def zigzag_tokens(tokens: int, ring: int, context: int, ring_rank: int, context_rank: int) -> tuple[range, ...]:
    """Return the tokens of a rank of a ring of context-parallel groups, in the order in which it holds them.

    Concatenated over the context ranks of a ring rank, in their order, the ranges are that rank's two chunks.

    Args:
        tokens: T, a multiple of :func:`zigzag_multiple`.
        ring: R.
        context: C, the ranks of each context-parallel group.
        ring_rank: position in the ring.
        context_rank: position in the context-parallel group.

    Returns:
        One range, or two for the middle rank of an odd C, of T / (R * C) tokens together.

    Raises:
        ValueError: `tokens` not such a multiple, or a rank out of range.

    >>> [zigzag_tokens(48, 2, 3, 0, rank) for rank in range(3)]  # chunks 0 to 11 and 36 to 47
    [(range(0, 8),), (range(8, 12), range(36, 40)), (range(40, 48),)]
    """
    multiple = zigzag_multiple(ring, context)
    if padded_length(tokens, multiple) != tokens:
        raise ValueError(
            f"tokens={tokens} must be a multiple of {multiple} (ring {ring}, context {context}); "
            f"pad the sequence to {padded_length(tokens, multiple)}"
        )
    _check_rank("ring_rank", ring_rank, ring)
    chunk = tokens // (2 * ring)
    mine = token_range(2 * chunk, context, context_rank)
    ranges = []
    for index, number in enumerate((ring_rank, 2 * ring - 1 - ring_rank)):
        start, stop = max(mine.start, index * chunk), min(mine.stop, (index + 1) * chunk)
        shift = (number - index) * chunk
        if start < stop:
            ranges.append(range(start + shift, stop + shift))
    return tuple(ranges)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")


def _check_rank(name: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"{name}={rank} must be one of 0 to {ranks - 1}")


def _check_borders(borders: Sequence[int]) -> None:
    falls = any(after < before for before, after in pairwise(borders))
    if len(borders) < 2 or borders[0] != 0 or falls:
        raise ValueError(f"borders must start at 0, never fall and hold a document; got {list(borders[:8])} ...")
