"""Corpora and the stream of samples: what is refused, and that every sample comes once an epoch."""

import json
import os
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.data import TOKEN_DTYPES, Batches, Corpus, Windows, eval_batches, load_tokens, split
from upipe import shard_batch


def make_corpus(sizes=(1,), name="numbers"):
    """Token i is i, so a sample says where it comes from; one document a size."""
    borders = np.cumsum([0, *sizes], dtype=np.int64)
    return Corpus(np.arange(borders[-1], dtype=np.int32), borders, name, has_documents=len(sizes) > 1)


def unpadded(batch):
    return [row[mask].tolist() for row, mask in zip(batch["input_ids"], batch["labels"] != -100, strict=True)]


class TestSources:
    def test_stdlib_is_python_source_with_a_document_a_file(self):
        corpus = load_tokens("stdlib", 256)
        assert len(corpus.tokens) > 5_000_000
        assert corpus.borders[0] == 0
        assert corpus.borders[-1] == len(corpus.tokens)
        assert (np.diff(corpus.borders) > 0).all()
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = corpus.tokens.tobytes()
        for file in (folder / "json" / "decoder.py", folder / "__future__.py"):
            source = file.read_bytes()
            start = text.find(source)
            assert {start, start + len(source)} <= set(corpus.borders.tolist())
        # site-packages are somebody's choice of packages.
        assert Path(np.__file__).read_bytes() not in text

    def test_order_does_not_depend_on_the_file_system(self, tmp_path, monkeypatch):
        for name in ("b", "a", "d", "c"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).write_text(name)
        walked = list(os.walk(tmp_path))
        for order in (walked, walked[::-1]):
            monkeypatch.setattr(os, "walk", lambda _, order=order: iter(order))
            assert bytes(load_tokens(str(tmp_path), 256).tokens) == b"abcd"

    def test_text_file_is_its_bytes(self, tmp_path):
        (tmp_path / "a.txt").write_text("žluť\n", encoding="utf-8")
        corpus = load_tokens(str(tmp_path / "a.txt"), 256)
        assert bytes(corpus.tokens).decode() == "žluť\n"
        assert corpus.borders.tolist() == [0, 7]
        assert not corpus.has_documents

    def test_folder_is_sorted_text_without_hidden_empty_and_binary_files(self, tmp_path):
        for name, content in {
            "b/2.txt": b"second",
            "b/10.md": b"tenth!!",
            "a.py": b"1st",
            "empty.txt": b"",
            ".hidden": b"no",
            ".git/config": b"no",
            "c.png": b"\x89PNG\xff",
        }.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        corpus = load_tokens(str(tmp_path), 256)
        assert bytes(corpus.tokens) == b"1sttenth!!second"
        assert corpus.borders.tolist() == [0, 3, 10, 16]
        assert corpus.has_documents

    @pytest.mark.parametrize("dtype", [*TOKEN_DTYPES, ">u2"])
    def test_npy_is_mapped_not_read(self, tmp_path, dtype):
        np.save(tmp_path / "t.npy", np.arange(7, dtype=dtype))
        corpus = load_tokens(str(tmp_path / "t.npy"), 7)
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.borders.tolist() == [0, 7]
        batch = Windows(corpus, 4, documents=False).batch([0, 1])
        assert unpadded(batch) == [[0, 1, 2, 3], [4, 5, 6]]

    @pytest.mark.parametrize("dtype", TOKEN_DTYPES)
    def test_bin_is_mapped_with_its_dtype(self, tmp_path, dtype):
        np.arange(5, dtype=dtype).tofile(tmp_path / "t.bin")
        corpus = load_tokens(str(tmp_path / "t.bin"), 5, token_dtype=dtype)
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokens.tolist() == [0, 1, 2, 3, 4]


class TestRefusedSources:
    def test_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"nowhere\.txt: no such file or folder; give"):
            load_tokens(str(tmp_path / "nowhere.txt"), 256)

    @pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin"])
    def test_empty_file(self, tmp_path, name):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name}: the file is empty"):
            load_tokens(str(tmp_path / name), 256, token_dtype="uint16" if name == "a.bin" else None)

    def test_unreadable_file(self, tmp_path, monkeypatch):
        # Permission bits do not bind root, so the refusal is made here.
        def refuse(_):
            raise PermissionError(13, "Permission denied")

        (tmp_path / "a.txt").write_text("text")
        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ValueError, match=rf"{tmp_path}: cannot be read: Permission denied; choose another source"):
            load_tokens(str(tmp_path), 256)

    def test_truncated_npy(self, tmp_path):
        np.save(tmp_path / "t.npy", np.arange(1000))
        (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-3])
        with pytest.raises(ValueError, match=r"t\.npy: not a whole \.npy file"):
            load_tokens(str(tmp_path / "t.npy"), 1000)

    @pytest.mark.parametrize("content", [b"\x93NUM", b"just text", b"\x93NUMPY\x01\x00\x10"])
    def test_npy_without_a_header(self, tmp_path, content):
        (tmp_path / "t.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.npy: not a whole \.npy file"):
            load_tokens(str(tmp_path / "t.npy"), 1000)

    @pytest.mark.parametrize(
        "array",
        [np.ones(3), np.ones((2, 3), int), np.ones(3, bool), np.int64(3), np.ones(0, int)],
        ids=["float", "matrix", "bool", "scalar", "none"],
    )
    def test_npy_of_something_else(self, tmp_path, array):
        np.save(tmp_path / "t.npy", array)
        with pytest.raises(ValueError, match=r"t\.npy: must hold token ids as integers \[tokens\], got"):
            load_tokens(str(tmp_path / "t.npy"), 1000)

    def test_npy_of_objects(self, tmp_path):
        np.save(tmp_path / "t.npy", np.array([{}, 1], dtype=object))
        with pytest.raises(ValueError, match=r"t\.npy: not a whole \.npy file"):
            load_tokens(str(tmp_path / "t.npy"), 1000)

    def test_truncated_bin(self, tmp_path):
        (tmp_path / "t.bin").write_bytes(bytes(7))
        with pytest.raises(ValueError, match=r"t\.bin: its 7 bytes are not a multiple of 4 \(uint32\)"):
            load_tokens(str(tmp_path / "t.bin"), 5, token_dtype="uint32")

    def test_token_dtype_is_for_bin_and_needed_there(self, tmp_path):
        (tmp_path / "t.bin").write_bytes(bytes(8))
        with pytest.raises(ValueError, match=r"token_dtype=None with .*needs one of uint8, uint16"):
            load_tokens(str(tmp_path / "t.bin"), 5)
        with pytest.raises(ValueError, match=r"token_dtype=float16 of .*must be one of uint8, uint16"):
            load_tokens(str(tmp_path / "t.bin"), 5, token_dtype="float16")
        with pytest.raises(ValueError, match=r"token_dtype=uint8 with stdlib: .*use token_dtype=None"):
            load_tokens("stdlib", 256, token_dtype="uint8")

    @pytest.mark.parametrize("content", [b"caf\xe9 au lait", b"cut off \xc5"])
    def test_not_utf8(self, tmp_path, content):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 text"):
            load_tokens(str(tmp_path / "a.txt"), 256)

    def test_folder_without_text(self, tmp_path):
        (tmp_path / "picture").write_bytes(b"\xff\xd8")
        (tmp_path / "empty").touch()
        with pytest.raises(ValueError, match=r"no text in this folder"):
            load_tokens(str(tmp_path), 256)

    @pytest.mark.parametrize(("ids", "said"), [([0, 31, 4], "0 to 31, vocab_size=31"), ([5, -3, 2], "-3 to 5")])
    def test_ids_outside_the_vocabulary(self, tmp_path, monkeypatch, ids, said):
        monkeypatch.setattr("experiments.data.SCAN_TOKENS", 2)
        np.save(tmp_path / "t.npy", np.array(ids, dtype=np.int16))
        with pytest.raises(ValueError, match=rf"t\.npy: token ids go from {said}.*use a vocab_size of"):
            load_tokens(str(tmp_path / "t.npy"), 31)

    def test_utf8_is_checked_over_the_borders_of_the_scan(self, tmp_path, monkeypatch):
        monkeypatch.setattr("experiments.data.SCAN_TOKENS", 3)
        (tmp_path / "a.txt").write_text("aažžž€", encoding="utf-8")
        assert len(load_tokens(str(tmp_path / "a.txt"), 256).tokens) == 11
        (tmp_path / "a.txt").write_bytes("aažžž€".encode()[:-1])
        with pytest.raises(ValueError, match="not UTF-8"):
            load_tokens(str(tmp_path / "a.txt"), 256)


class TestSplit:
    def test_one_document_gives_its_end(self):
        train, held_out = split(make_corpus([50]), 0.1)
        assert train.tokens.tolist() == list(range(45))
        assert held_out.tokens.tolist() == list(range(45, 50))
        assert (train.borders.tolist(), held_out.borders.tolist()) == ([0, 45], [0, 5])

    def test_every_nth_document_is_held_out(self):
        sizes = list(range(3, 23))
        corpus = make_corpus(sizes)
        train, held_out = split(corpus, 0.1)
        assert np.diff(held_out.borders).tolist() == [12, 22]
        assert np.diff(train.borders).tolist() == [size for size in sizes if size not in (12, 22)]
        assert held_out.tokens[:12].tolist() == corpus.tokens[corpus.borders[9] : corpus.borders[10]].tolist()

    def test_few_documents_are_cut_by_tokens(self):
        train, held_out = split(make_corpus([7, 20, 3]), 0.2)
        assert (train.borders.tolist(), held_out.borders.tolist()) == ([0, 7, 24], [0, 3, 6])

    @given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=40), percent=st.integers(5, 95))
    def test_parts_make_the_whole(self, sizes, percent):
        corpus = make_corpus(sizes)
        try:
            parts = split(corpus, percent / 100)
        except ValueError:
            assert len(corpus.tokens) < 11
            return
        assert sorted(token for part in parts for token in part.tokens.tolist()) == corpus.tokens.tolist()
        for part in parts:
            assert part.borders[0] == 0
            assert part.borders[-1] == len(part.tokens) > 0
            assert part.borders.dtype == np.int64
            assert (np.diff(part.borders) > 0).all()
            # A border of the part is one of the corpus, or an end: what follows it began a document.
            starts = part.tokens[part.borders[:-1]]
            assert set(starts[1:].tolist()) <= set(corpus.borders.tolist())

    @pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
    def test_refuses_a_fraction(self, fraction):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            split(make_corpus([50]), fraction)

    def test_refuses_an_empty_part(self):
        with pytest.raises(ValueError, match=r"held_out_fraction=0\.01 of the 7 tokens of numbers leaves"):
            split(make_corpus([7]), 0.01)


class TestWindows:
    def test_short_end_is_padded_with_masked_labels(self):
        batch = Windows(make_corpus([11]), 4, documents=False).batch([2, 0])
        assert batch["input_ids"].tolist() == [[8, 9, 10, 0], [0, 1, 2, 3]]
        assert batch["labels"].tolist() == [[8, 9, 10, -100], [0, 1, 2, 3]]
        assert {value.dtype for value in batch.values()} == {torch.int64}
        assert "cu_seqlens" not in batch

    def test_documents_inside_a_window(self):
        windows = Windows(make_corpus([3, 1, 8, 6, 4]), 6, documents=True)
        borders = [windows.batch([index])["cu_seqlens"] for index in range(len(windows))]
        assert [border.tolist() for border in borders] == [[0, 3, 4, 6], [0, 6], [0, 6], [0, 4, 6]]
        assert borders[0].dtype == torch.int32

    @given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=12), length=st.integers(2, 10))
    def test_no_token_predicts_one_of_another_document(self, sizes, length):
        self.check_predictions(sizes, length)

    def check_predictions(self, sizes, length):
        corpus = make_corpus(sizes)
        windows = Windows(corpus, min(length, len(corpus.tokens)), documents=True)
        first = set(corpus.borders.tolist())
        predicted = []
        for index in range(len(windows)):
            sharded = shard_batch(windows.batch([index]), group=None)
            labels, ids = sharded["labels"][0], sharded["input_ids"][0]
            valid = labels != -100
            assert (labels[valid] == ids[valid] + 1).all()
            predicted += labels[valid].tolist()
        starts = set(range(0, len(corpus.tokens), windows.sequence_length))
        assert predicted == [token for token in range(len(corpus.tokens)) if token not in first | starts]

    def test_the_property_catches_windows_without_borders(self, monkeypatch):
        def ends_only(self, run):
            return torch.tensor([0, self.sequence_length], dtype=torch.int32)

        monkeypatch.setattr(Windows, "_cu_seqlens", ends_only)
        with pytest.raises(AssertionError):
            self.check_predictions([3, 5], 4)

    def test_refuses_what_does_not_fit(self):
        with pytest.raises(ValueError, match="sequence_length=12 needs 12 tokens, numbers has 11; use at most 11"):
            Windows(make_corpus([11]), 12, documents=False)
        with pytest.raises(ValueError, match="sequence_length=1 must be at least 2"):
            Windows(make_corpus([11]), 1, documents=False)
        with pytest.raises(ValueError, match="documents=True needs document borders and numbers has none"):
            Windows(make_corpus([11]), 4, documents=True)

    def test_names_the_part(self):
        train, held_out = split(make_corpus([50], name="stdlib"), 0.1)
        with pytest.raises(ValueError, match="needs 46 tokens, the training part of stdlib has 45; use at most 45"):
            Batches(train, sequence_length=46, batch_size=1, seed=0)
        with pytest.raises(ValueError, match="needs 6 tokens, the held-out part of stdlib has 5; use at most 5"):
            eval_batches(held_out, sequence_length=6, batch_size=1)


def stream(loaders, steps, length):
    """Sample indices that `loaders`, the shards, give in `steps` batches."""
    out = []
    for _ in range(steps):
        assert len({tuple(loader.state_dict().items()) for loader in loaders}) == 1
        out += [row[0] // length for loader in loaders for row in unpadded(loader.next_batch())]
    return out


def make_loaders(corpus, shards, per_shard, length=3, **options):
    options = {"sequence_length": length, "batch_size": shards * per_shard, "seed": 5, **options}
    return [Batches(corpus, num_shards=shards, shard=shard, **options) for shard in range(shards)]


class TestBatches:
    @given(
        num_tokens=st.integers(3, 60),
        shards=st.integers(1, 4),
        per_shard=st.integers(1, 3),
        stop=st.integers(0, 25),
        later=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        shuffle=st.booleans(),
    )
    def test_every_sample_once_an_epoch_also_over_a_resume(self, num_tokens, shards, per_shard, stop, later, shuffle):
        corpus = make_corpus([num_tokens])
        epoch = -(-num_tokens // 3)
        before = make_loaders(corpus, shards, per_shard, shuffle=shuffle)
        seen = stream(before, stop, 3)
        after = make_loaders(corpus, *later, shuffle=shuffle)
        for loader in after:
            loader.load_state_dict(before[0].state_dict())
        seen += stream(after, -(-3 * epoch // (later[0] * later[1])), 3)
        for start in range(0, len(seen) - epoch + 1, epoch):
            assert sorted(seen[start : start + epoch]) == list(range(epoch))
        # The order does not depend on how the work is shared out or where it was interrupted.
        assert seen == stream(make_loaders(corpus, 1, 1, shuffle=shuffle), len(seen), 3)

    def test_the_property_catches_a_loader_that_drops_the_last_batch(self):
        class Dropping(Batches):
            def next_batch(self):
                if self._index + self._batch_size > self.samples_per_epoch:
                    self._seek(self._epoch + 1, 0)
                return super().next_batch()

        loader = Dropping(make_corpus([21]), sequence_length=3, batch_size=2, seed=5)
        assert max(Counter(stream([loader], 7, 3)).values()) > 2

    def test_orders_differ_by_epoch_and_seed(self):
        corpus = make_corpus([120])
        (loader,) = make_loaders(corpus, 1, 1)
        epochs = [stream([loader], 40, 3) for _ in range(3)]
        assert loader.state_dict()["epoch"] == 3
        (other,) = make_loaders(corpus, 1, 1, seed=6)
        orders = {tuple(order) for order in [*epochs, stream([other], 40, 3), range(40)]}
        assert len(orders) == 5
        assert [sorted(order) for order in epochs] == [list(range(40))] * 3

    def test_unshuffled_is_the_text_as_it_lies(self):
        loaders = make_loaders(make_corpus([21]), 2, 2, shuffle=False)
        assert stream(loaders, 3, 3) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]

    def test_shards_cut_the_global_batch_in_order(self):
        corpus = make_corpus([100])
        (whole,) = make_loaders(corpus, 1, 6)
        parts = [loader.next_batch()["input_ids"] for loader in make_loaders(corpus, 3, 2)]
        assert [part.shape for part in parts] == [(2, 3)] * 3
        assert torch.equal(torch.cat(parts), whole.next_batch()["input_ids"])

    def test_a_state_goes_through_json_and_keeps_the_documents(self):
        corpus = make_corpus([3, 1, 8, 6, 4])
        (first,) = make_loaders(corpus, 1, 1, length=6, documents=True)
        first.next_batch()
        state = json.loads(json.dumps(first.state_dict()))
        assert state == {
            "epoch": 0,
            "index": 1,
            "seed": 5,
            "shuffle": True,
            "sequence_length": 6,
            "tokens": 22,
        }
        (second,) = make_loaders(corpus, 1, 1, length=6, documents=True)
        second.load_state_dict(state)
        expected, got = first.next_batch(), second.next_batch()
        assert expected.keys() == got.keys() == {"input_ids", "labels", "cu_seqlens"}
        assert all(torch.equal(expected[name], got[name]) for name in expected)

    def test_refuses_batch_sizes(self):
        corpus = make_corpus([5, 6])
        options = {"sequence_length": 3, "seed": 0}
        with pytest.raises(ValueError, match=r"batch_size=5 must be a multiple of num_shards=2 .*valid: 2, 4, 6"):
            Batches(corpus, batch_size=5, num_shards=2, **options)
        with pytest.raises(ValueError, match="batch_size=0 must be a multiple"):
            Batches(corpus, batch_size=0, **options)
        with pytest.raises(ValueError, match=r"documents=True packs one sample a rank: batch_size=4 must be 2"):
            Batches(corpus, batch_size=4, num_shards=2, documents=True, **options)
        with pytest.raises(ValueError, match="shard=2 must be one of the num_shards=2 shards"):
            Batches(corpus, batch_size=2, num_shards=2, shard=2, **options)
        with pytest.raises(ValueError, match="seed=-1 must be 0 or more"):
            Batches(corpus, batch_size=2, sequence_length=3, seed=-1)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"seed": 6}, "another stream of samples: seed=6, here 5"),
            ({"tokens": 20}, "tokens=20, here 21"),
            ({"sequence_length": 4, "shuffle": False}, "shuffle=False, here True, sequence_length=4, here 3"),
            ({"index": 7}, "stands at epoch=0, index=7; valid: epochs from 0 and indices 0 to 6"),
            ({"epoch": -1}, "epoch=-1"),
            ({"extra": 1}, "has the keys"),
        ],
    )
    def test_refuses_the_state_of_another_stream(self, change, said):
        (loader,) = make_loaders(make_corpus([21]), 1, 1)
        with pytest.raises(ValueError, match=said):
            loader.load_state_dict({**loader.state_dict(), **change})


class TestEval:
    @given(
        num_tokens=st.integers(3, 40), shards=st.integers(1, 4), per_shard=st.integers(1, 3), limit=st.integers(1, 20)
    )
    def test_every_window_once_and_equally_many_batches(self, num_tokens, shards, per_shard, limit):
        corpus = make_corpus([num_tokens])
        batches = [
            list(
                eval_batches(
                    corpus,
                    sequence_length=3,
                    batch_size=shards * per_shard,
                    limit=limit,
                    num_shards=shards,
                    shard=shard,
                )
            )
            for shard in range(shards)
        ]
        assert len({len(own) for own in batches}) == 1
        assert {tuple(batch["input_ids"].shape) for own in batches for batch in own} == {(per_shard, 3)}
        seen = sorted(token for own in batches for batch in own for row in unpadded(batch) for token in row)
        assert seen == list(range(min(num_tokens, 3 * limit)))

    def test_filler_has_one_document_and_no_label(self):
        corpus = make_corpus([5, 6])
        *_, last = eval_batches(corpus, sequence_length=4, batch_size=2, documents=True, num_shards=2, shard=1)
        assert last["cu_seqlens"].tolist() == [0, 4]
        assert last["labels"].tolist() == [[-100] * 4]
        assert last["input_ids"].tolist() == [[0] * 4]

    def test_refuses_at_the_call(self):
        with pytest.raises(ValueError, match="limit=0 must be at least 1 window"):
            eval_batches(make_corpus([9]), sequence_length=3, batch_size=1, limit=0)
        with pytest.raises(ValueError, match="batch_size=3 must be a multiple of num_shards=2"):
            eval_batches(make_corpus([9]), sequence_length=3, batch_size=3, num_shards=2)
