"""From a batch with the whole sequence to the batch of one rank.

Letters: B batch, T tokens of the whole sequence, S tokens of this rank.

Whatever depends on neighbouring tokens (the label shift, positions, document borders, padding) is done here, on the
whole sequence and before the cut. Done after it, each rank would lose the label at its end and count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from upipe.collectives import group_rank, group_size
from upipe.layout import document_positions, pad_documents, padded_length, token_range
from upipe.mask import AttentionMask

IGNORE_INDEX = -100
# Keys with a meaning; a None under one of them counts as absent.
_KNOWN_KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "cu_seqlens", "attention_mask")


def shard_batch(
    batch: Mapping[str, Any], *, group: dist.ProcessGroup | None, pad_to: int | None = None
) -> dict[str, Any]:
    """Shift the labels, pad, add positions, and cut every per-token tensor for this rank.

    The labels that come out are ALREADY SHIFTED: the label of a token is the token after it, also at the border between
    two ranks. Use them with a loss that does not shift again (Hugging Face models call such labels ``shift_labels``).

    Args:
        batch: the WHOLE sequence, the same on every rank:

            - input_ids: ``[B, T]``, required.
            - labels: ``[B, T]`` as in Hugging Face, not shifted: the token itself, or -100 to ignore it. With
              cu_seqlens the last token of each document predicts nothing.
            - shift_labels: ``[B, T]``, in the place of labels when they are shifted already.
            - position_ids: ``[B, T]`` or ``[T]``; where absent, from 0 a row, or a document with cu_seqlens.
            - cu_seqlens: int32 ``[documents + 1]``, borders from 0 to T; B = 1.
            - attention_mask: ``[B, T]`` of 1 and 0, right padding at most. It is dropped: no token of a row sees the
              padding after it, given a causal mask, and labels that are padding become -100.
            - other tensors ``[B, T, ...]`` are cut, padded with zeros; all else passes through whole.
        group: the context-parallel ranks; None is this process alone.
        pad_to: T with padding, a multiple of the number of ranks; None pads to the next multiple.

    Returns:
        A new dict: per-token tensors ``[B, S, ...]`` with storage of their own, "position_ids" always, "labels"
        (shifted) when there were any, "cu_seqlens" in tokens of the whole sequence, padding as its own document.
        Padding has input id 0 and label -100; its positions continue those of the row.

    Raises:
        ValueError: no input_ids; a known key with another shape or dtype; labels twice; left padding or holes;
            a `pad_to` that does not fit; no group although torch.distributed is initialised.

    Cost: no communication. Reads cu_seqlens and attention_mask on the host.

    >>> whole = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    >>> for name, value in shard_batch(whole, group=None, pad_to=4).items():
    ...     print(name, value.tolist())
    input_ids [[5, 6, 7, 0]]
    labels [[6, 7, -100, -100]]
    position_ids [[0, 1, 2, 3]]
    """
    ranks, rank = group_size(group), group_rank(group)
    known = {name: batch[name] for name in _KNOWN_KEYS if batch.get(name) is not None}
    shape = _check_batch(known)
    length = _check_length(shape[1], ranks, pad_to)
    mine = token_range(length, ranks, rank)
    borders = _borders(known.get("cu_seqlens"), shape)
    real = _real_tokens(known.get("attention_mask"))

    sharded: dict[str, Any] = {}
    for name, value in batch.items():
        if name in ("labels", "shift_labels") and name in known:
            labels = _shifted(value, borders, real) if name == "labels" else _mask_padding(value, real)
            sharded["labels"] = _cut(labels, mine, IGNORE_INDEX)
        elif name == "cu_seqlens" and borders is not None:
            sharded[name] = torch.tensor(pad_documents(borders, length), dtype=value.dtype, device=value.device)
        elif name not in _KNOWN_KEYS or name == "input_ids":
            per_token = isinstance(value, Tensor) and value.shape[:2] == shape
            sharded[name] = _cut(value, mine, 0) if per_token else value
    if "position_ids" in known:
        sharded["position_ids"] = _cut_positions(known["position_ids"], mine, restart=borders is not None)
    else:
        sharded["position_ids"] = _positions(borders, mine, length, known["input_ids"])
    return sharded


def _check_batch(known: Mapping[str, Any]) -> torch.Size:
    ids = known.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0:
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f'batch["input_ids"] must be a tensor [B, T] with the whole sequence; got {got}')
    if "labels" in known and "shift_labels" in known:
        raise ValueError("the batch has labels and shift_labels; keep labels (not shifted) or shift_labels (shifted)")
    valid: dict[str, tuple[torch.Size, ...]] = dict.fromkeys(("labels", "shift_labels", "attention_mask"), (ids.shape,))
    valid["position_ids"] = (ids.shape, ids.shape[1:])
    for name, shapes in valid.items():
        if name in known and (not isinstance(known[name], Tensor) or known[name].shape not in shapes):
            got = list(known[name].shape) if isinstance(known[name], Tensor) else type(known[name]).__name__
            raise ValueError(
                f'batch["{name}"] must be {" or ".join(str(list(shape)) for shape in shapes)}, as input_ids; got {got}'
            )
    for name in ("labels", "shift_labels", "position_ids"):
        if name in known and (known[name].is_floating_point() or not known[name].dtype.is_signed):
            raise ValueError(f'batch["{name}"] must be signed integers; got {known[name].dtype}, use torch.int64')
    return ids.shape


def _check_length(tokens: int, ranks: int, pad_to: int | None) -> int:
    least = padded_length(tokens, ranks)
    if pad_to is None:
        return least
    if pad_to < tokens or pad_to % ranks:
        raise ValueError(
            f"pad_to={pad_to} must be a multiple of {ranks} (ranks) and hold the {tokens} tokens; "
            f"valid: {least}, {least + ranks}, ..."
        )
    return pad_to


def _borders(cu_seqlens: Tensor | None, shape: torch.Size) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    AttentionMask(cu_seqlens=cu_seqlens)  # refuses what are not borders
    borders = tuple(cu_seqlens.tolist())
    if shape[0] != 1:
        raise ValueError(f"cu_seqlens needs batch size 1, got {shape[0]}; pack the rows into one sequence")
    if borders[-1] != shape[1]:
        raise ValueError(
            f"cu_seqlens ends at {borders[-1]} but input_ids has {shape[1]} tokens; give the borders of the "
            "sequence as it is, the document of the padding is added here"
        )
    return borders


def _real_tokens(attention_mask: Tensor | None) -> Tensor | None:
    """Return boolean ``[B, T]``, None without padding."""
    if attention_mask is None:
        return None
    real = attention_mask != 0
    if bool((attention_mask[real] != 1).any()):
        raise ValueError("attention_mask must hold 1 and 0 only; for packed documents pass cu_seqlens")
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError(
            "attention_mask has padding on the left or holes, which a causal mask does not hide; pad on the right, or "
            "pack the rows into one sequence with cu_seqlens"
        )
    return None if bool(real.all()) else real


def _shifted(labels: Tensor, borders: tuple[int, ...] | None, real: Tensor | None) -> Tensor:
    if real is not None:
        labels = labels.masked_fill(~real, IGNORE_INDEX)
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    if borders is not None:
        last_of_document = torch.tensor([border - 1 for border in borders if border > 0], device=labels.device)
        shifted[:, last_of_document] = IGNORE_INDEX
    return shifted


def _mask_padding(shift_labels: Tensor, real: Tensor | None) -> Tensor:
    """Ignore shifted labels of padding, and those whose token is followed by padding."""
    if real is None:
        return shift_labels
    # The token after the last one is not in the batch; its label may be.
    next_real = torch.cat([real[:, 1:], real[:, -1:]], dim=1)
    return shift_labels.masked_fill(~next_real, IGNORE_INDEX)


def _cut(tensor: Tensor, mine: range, fill: int) -> Tensor:
    """Copy tokens `mine` of ``[B, T, ...]``; those after T are `fill`."""
    out = tensor.new_full((tensor.shape[0], len(mine), *tensor.shape[2:]), fill)
    inside = tensor[:, mine.start : mine.stop]
    out[:, : inside.shape[1]] = inside
    return out


def _cut_positions(positions: Tensor, mine: range, *, restart: bool) -> Tensor:
    """Copy positions `mine` of ``[B, T]`` or ``[T]``; those of padding continue, or restart as a document."""
    tokens = positions.shape[-1]
    inside = positions[..., mine.start : mine.stop]
    padding = torch.arange(
        max(mine.start - tokens, 0), max(mine.stop - tokens, 0), dtype=positions.dtype, device=positions.device
    )
    start = torch.zeros_like(positions[..., -1:]) if restart else positions[..., -1:] + 1
    return torch.cat([inside, start + padding], dim=-1)


def _positions(borders: tuple[int, ...] | None, mine: range, length: int, ids: Tensor) -> Tensor:
    borders = (0, length) if borders is None else pad_documents(borders, length)
    runs = [torch.arange(run.start, run.stop, device=ids.device) for run in document_positions(borders, mine)]
    return torch.cat(runs).repeat(ids.shape[0], 1)
