"""Text as token ids, and the stream of training samples cut from it. Nothing is downloaded.

Letters: B samples of this rank, T tokens of a sample (the whole sequence, before it is cut over context ranks).

A corpus is one long array of token ids with document borders. Sample i is its window [i*T, (i+1)*T), so windows do not
overlap and the last one may be short: it is padded with masked labels, never dropped. Inside a window each token
predicts the next one; the first token of a window is predicted by nothing.

Two halves in one file, because a reader of either asks for the other: where the tokens come from (to `split`), and how
samples are cut from them and in which order (from `Windows`).
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from upipe.batch import IGNORE_INDEX

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
# A file of token ids may be larger than memory; it is checked in pieces of this many tokens.
SCAN_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids in one line.

    Args:
        tokens: ``[tokens]`` of any integer dtype; a memmap for files.
        borders: int64 ``[documents + 1]``, from 0 to the number of tokens.
        name: as it appears in errors and records.
        has_documents: the borders are those of files; False where the source knows no documents and has one only.
    """

    tokens: np.ndarray
    borders: np.ndarray
    name: str
    has_documents: bool


def load_tokens(source: str, vocab_size: int, *, token_dtype: str | None = None) -> Corpus:
    """Open a corpus and check every token id against the vocabulary.

    Args:
        source: "stdlib" (the source files of the Python standard library; for a folder of that name write "./stdlib"),
            a text file, a folder, a ``.npy`` or a ``.bin`` file of token ids. Text must be UTF-8, a token is a byte.
            A folder gives one document for each UTF-8 file below it; hidden and empty files are left out, and files
            that are not UTF-8 (pictures, archives).
        vocab_size: token ids must be below it.
        token_dtype: of a raw ``.bin`` file, one of TOKEN_DTYPES; None for everything else.

    Raises:
        ValueError: nothing there, no tokens in it, a damaged file, not text, or ids outside the vocabulary.
    """
    path = Path(source)
    if (token_dtype is not None) != (source != "stdlib" and path.suffix == ".bin"):
        raise ValueError(
            f"token_dtype={token_dtype} with {source}: a raw .bin file needs one of {', '.join(TOKEN_DTYPES)}; "
            "everything else knows its own, use token_dtype=None"
        )
    try:
        if source == "stdlib":
            corpus = _load_stdlib()
        elif path.is_dir():
            corpus = _load_folder(path)
        elif not path.is_file():
            raise ValueError(f"{source}: no such file or folder; give a text file, a folder, .npy, .bin, or stdlib")
        elif path.stat().st_size == 0:
            raise ValueError(f"{source}: the file is empty; give one with tokens")
        else:
            tokens = {".npy": _open_npy, ".bin": _open_bin}.get(path.suffix, _open_text)(path, token_dtype)
            corpus = Corpus(tokens, np.array([0, len(tokens)], dtype=np.int64), source, has_documents=False)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror or error}; choose another source") from error
    _check_ids(corpus, vocab_size)
    return corpus


def _load_stdlib() -> Corpus:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file for file in _files_below(folder, leave_out=("site-packages", "dist-packages")) if file.suffix == ".py"
    ]
    return _join(folder, [file.read_bytes() for file in files], "stdlib")


def _load_folder(folder: Path) -> Corpus:
    files = [file.read_bytes() for file in _files_below(folder)]
    return _join(folder, [text for text in files if _is_utf8(text)], str(folder))


def _files_below(folder: Path, leave_out: Sequence[str] = ()) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in leave_out and not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    # By relative path, the same on every file system.
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _join(folder: Path, texts: Sequence[bytes], name: str) -> Corpus:
    if not any(texts):
        raise ValueError(
            f"{folder}: no text in this folder (hidden, empty and non-UTF-8 files do not count); choose one with text"
        )
    borders = np.cumsum([0, *(len(text) for text in texts if text)], dtype=np.int64)
    return Corpus(np.frombuffer(b"".join(texts), dtype=np.uint8), borders, name, has_documents=True)


def _open_text(path: Path, _: None) -> np.ndarray:
    tokens = np.memmap(path, dtype=np.uint8, mode="r")
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(tokens), SCAN_TOKENS):
            decoder.decode(tokens[start : start + SCAN_TOKENS].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); convert it, or give token ids as .npy") from error
    return tokens


def _open_npy(path: Path, _: None) -> np.ndarray:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a whole .npy file ({error}); write it again with numpy.save") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or not len(tokens):
        raise ValueError(
            f"{path}: must hold token ids as integers [tokens], got {tokens.dtype} {list(tokens.shape)}; "
            f"save one axis of {', '.join(TOKEN_DTYPES)}"
        )
    return tokens


def _open_bin(path: Path, token_dtype: str) -> np.ndarray:
    if token_dtype not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype={token_dtype} of {path} must be one of {', '.join(TOKEN_DTYPES)}")
    dtype, size = np.dtype(token_dtype), path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(
            f"{path}: its {size} bytes are not a multiple of {dtype.itemsize} ({token_dtype}); the file is cut off, or "
            "its token_dtype is another one"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _check_ids(corpus: Corpus, vocab_size: int) -> None:
    lowest, highest = 0, 0
    for start in range(0, len(corpus.tokens), SCAN_TOKENS):
        part = corpus.tokens[start : start + SCAN_TOKENS]
        lowest, highest = min(lowest, int(part.min())), max(highest, int(part.max()))
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"{corpus.name}: token ids go from {lowest} to {highest}, vocab_size={vocab_size} allows 0 to "
            f"{vocab_size - 1}; use a vocab_size of {highest + 1} or more and ids from 0"
        )


def split(corpus: Corpus, held_out_fraction: float) -> tuple[Corpus, Corpus]:
    """Split into a training part and a held-out part, the same on every call.

    Both parts get the same kind of text: with 1/fraction documents or more, every (1/fraction)-th document is held out,
    and the parts hold that fraction of the documents (of the tokens only about). With fewer documents, or none, the
    tokens at the end are held out.

    Raises:
        ValueError: the fraction is not between 0 and 1, or leaves a part without a token.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction={held_out_fraction} must be between 0 and 1, both excluded; try 0.1")
    num_documents, num_tokens = len(corpus.borders) - 1, len(corpus.tokens)
    names = [f"the {part} part of {corpus.name}" for part in ("training", "held-out")]
    # The small term lets 10 * 0.1 count as 1.
    counts = np.floor(np.arange(num_documents + 1) * held_out_fraction + 1e-9)
    if counts[-1] >= 1:
        held_out, sizes = np.diff(counts) > 0, np.diff(corpus.borders)
        of_token = np.repeat(held_out, sizes)
        train, evaluation = (
            Corpus(
                corpus.tokens[of_token == part], np.cumsum([0, *sizes[held_out == part]]), name, corpus.has_documents
            )
            for name, part in zip(names, (False, True), strict=True)
        )
        return train, evaluation
    cut = num_tokens - round(num_tokens * held_out_fraction)
    if not 0 < cut < num_tokens:
        raise ValueError(
            f"held_out_fraction={held_out_fraction} of the {num_tokens} tokens of {corpus.name} leaves a part without "
            "a token; use another fraction or more text"
        )
    before, after = corpus.borders[corpus.borders < cut], corpus.borders[corpus.borders > cut]
    return (
        Corpus(corpus.tokens[:cut], np.append(before, cut), names[0], corpus.has_documents),
        Corpus(corpus.tokens[cut:], np.append(0, after - cut), names[1], corpus.has_documents),
    )


@dataclass(frozen=True, eq=False)
class Windows:
    """The samples of a corpus by index, and batches of them.

    Args:
        corpus: where the tokens come from.
        sequence_length: T.
        documents: samples carry the document borders in them.
    """

    corpus: Corpus
    sequence_length: int
    documents: bool

    def __post_init__(self) -> None:
        length, available = self.sequence_length, len(self.corpus.tokens)
        if length < 2:
            raise ValueError(f"sequence_length={length} must be at least 2: a token predicts the next one")
        if length > available:
            raise ValueError(
                f"sequence_length={length} needs {length} tokens, {self.corpus.name} has {available}; "
                f"use at most {available}"
            )
        if self.documents and not self.corpus.has_documents:
            raise ValueError(
                f"documents=True needs document borders and {self.corpus.name} has none; use documents=False, or a "
                "folder with one file a document"
            )

    def __len__(self) -> int:
        return -(-len(self.corpus.tokens) // self.sequence_length)

    def batch(self, indices: Sequence[int | None]) -> dict[str, Tensor]:
        """Return "input_ids" and "labels" ``[B, T]`` int64, labels not shifted and -100 on padding (id 0).

        With documents also "cu_seqlens", int32 ``[documents + 1]`` from 0 to T, the padding a document of its own.
        An index of None gives a sample of padding only.
        """
        shape = (len(indices), self.sequence_length)
        ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
        for row, index in enumerate(indices):
            run = self._run(index)
            tokens = torch.from_numpy(np.array(self.corpus.tokens[run.start : run.stop], dtype=np.int64))
            ids[row, : len(run)] = tokens
            labels[row, : len(run)] = tokens
        batch = {"input_ids": ids, "labels": labels}
        if self.documents:
            (index,) = indices
            batch["cu_seqlens"] = self._cu_seqlens(self._run(index))
        return batch

    def _run(self, index: int | None) -> range:
        start = len(self.corpus.tokens) if index is None else index * self.sequence_length
        return range(start, min(start + self.sequence_length, len(self.corpus.tokens)))

    def _cu_seqlens(self, run: range) -> Tensor:
        first, last = np.searchsorted(self.corpus.borders, [run.start, run.stop], side="right")
        inside = self.corpus.borders[first:last] - run.start
        # Sorted and without doubles: a document may end where the window does.
        return torch.from_numpy(np.unique([0, *inside, len(run), self.sequence_length]).astype(np.int32))


def _shard_slice(batch_size: int, num_shards: int, shard: int, documents: bool) -> slice:
    """Return the samples of a global batch that are this shard's."""
    if num_shards < 1 or not 0 <= shard < num_shards:
        raise ValueError(f"shard={shard} must be one of the num_shards={num_shards} shards, counted from 0")
    if batch_size < 1 or batch_size % num_shards:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of num_shards={num_shards} (data-parallel ranks); "
            f"valid: {num_shards}, {2 * num_shards}, {3 * num_shards}, ..."
        )
    if documents and batch_size != num_shards:
        raise ValueError(
            f"documents=True packs one sample a rank: batch_size={batch_size} must be {num_shards} (data-parallel "
            "ranks); accumulate gradients for more"
        )
    own = batch_size // num_shards
    return slice(shard * own, (shard + 1) * own)


class Batches:
    """An endless, resumable stream of training batches; every sample once an epoch.

    An epoch visits all windows in an order that depends on the seed and the epoch. A global batch takes the next
    `batch_size` samples, over the end of an epoch into the next one, and shard d gets the d-th of `num_shards` equal
    parts. So all shards stand at the same place, and one state serves them all, also with another `batch_size` or
    `num_shards` afterwards.

    Args:
        corpus: where the windows are cut.
        sequence_length: T.
        batch_size: samples of one batch over all shards, a multiple of `num_shards`.
        seed: of the order, 0 or more.
        shuffle: False takes the windows as they lie.
        documents: batches carry "cu_seqlens"; needs ``batch_size == num_shards``.
        num_shards: data-parallel ranks. Ranks that share a sequence (context-parallel) use the same shard.
        shard: which of them this is.

    Raises:
        ValueError: a window longer than the corpus, or a batch size that does not fit.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        documents: bool = False,
        num_shards: int = 1,
        shard: int = 0,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed={seed} must be 0 or more")
        self._windows = Windows(corpus, sequence_length, documents)
        self._own = _shard_slice(batch_size, num_shards, shard, documents)
        self._batch_size = batch_size
        # A position means something for this order of these windows only.
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "sequence_length": sequence_length,
            "tokens": len(corpus.tokens),
        }
        self._seek(0, 0)

    @property
    def samples_per_epoch(self) -> int:
        return len(self._windows)

    def next_batch(self) -> dict[str, Tensor]:
        """Return the next batch of this shard, as :meth:`Windows.batch` describes it."""
        samples = []
        for _ in range(self._batch_size):
            samples.append(int(self._order[self._index]))
            self._index += 1
            if self._index == self.samples_per_epoch:
                self._seek(self._epoch + 1, 0)
        return self._windows.batch(samples[self._own])

    def state_dict(self) -> dict[str, int]:
        """Return where the stream stands: the same on all shards, plain numbers."""
        return {"epoch": self._epoch, "index": self._index, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the first sample that the loader of `state` had not given out.

        Raises:
            ValueError: the state is of other windows or another order.
        """
        here = self.state_dict()
        if state.keys() != here.keys():
            raise ValueError(f"a loader's state has the keys {sorted(here)}, got {sorted(state)}; use state_dict()")
        other = [name for name in self._identity if state[name] != here[name]]
        if other:
            raise ValueError(
                "the state is of another stream of samples: "
                + ", ".join(f"{name}={state[name]}, here {here[name]}" for name in other)
                + "; resume with the data options of the first run"
            )
        if state["epoch"] < 0 or not 0 <= state["index"] < self.samples_per_epoch:
            raise ValueError(
                f"the state stands at epoch={state['epoch']}, index={state['index']}; valid: epochs from 0 and "
                f"indices 0 to {self.samples_per_epoch - 1}"
            )
        self._seek(state["epoch"], state["index"])

    def _seek(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order: Sequence[int] | np.ndarray = range(self.samples_per_epoch)
        if self._identity["shuffle"]:
            self._order = np.random.default_rng([self._identity["seed"], epoch]).permutation(self.samples_per_epoch)


def eval_batches(
    corpus: Corpus,
    *,
    sequence_length: int,
    batch_size: int,
    limit: int | None = None,
    documents: bool = False,
    num_shards: int = 1,
    shard: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Return the batches of one pass over the first `limit` windows (None: all), each once, in order.

    Every shard gets equally many batches: a last global batch that is not full is filled with samples of padding only,
    whose labels are all -100.

    Raises:
        ValueError: as :class:`Batches`, or `limit` below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 window; use limit=None for all")
    windows = Windows(corpus, sequence_length, documents)
    own = _shard_slice(batch_size, num_shards, shard, documents)
    count = len(windows) if limit is None else min(limit, len(windows))
    indices = [*range(count), *[None] * (-count % batch_size)]
    # The checks above run at the call, a generator function would run them at the first batch.
    return (windows.batch(indices[start : start + batch_size][own]) for start in range(0, len(indices), batch_size))
