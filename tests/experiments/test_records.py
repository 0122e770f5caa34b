"""Records: what is refused, what a kill leaves behind, and the tables made of them."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from experiments import records as module
from experiments.records import (
    UNITS,
    Record,
    RecordFile,
    commit,
    markdown_table,
    open_output,
    pivot,
    table,
    versions,
)


def make(**changes):
    return Record(
        **{
            "experiment": "table4",
            "method": "upipe",
            "model": "llama3-8b",
            "hardware": "h100x8",
            "length_tokens": 5_242_880,
            "quantity": "peak_memory_gib",
            "value": 70.25,
            "commit": "abc123",
            "versions": {"torch": "2.13.0"},
            **changes,
        }
    )


class TestRecord:
    def test_line_has_the_fixed_keys_then_the_extra_ones(self):
        line = json.loads(make(published="OOM", extra={"step": 3, "loss": 2.5}).to_json())
        assert list(line.items()) == [
            ("experiment", "table4"),
            ("method", "upipe"),
            ("model", "llama3-8b"),
            ("hardware", "h100x8"),
            ("length_tokens", 5_242_880),
            ("quantity", "peak_memory_gib"),
            ("value", 70.25),
            ("unit", "GiB"),
            ("published", "OOM"),
            ("commit", "abc123"),
            ("versions", {"torch": "2.13.0"}),
            ("step", 3),
            ("loss", 2.5),
        ]
        assert json.loads(make().to_json())["published"] is None

    @settings(max_examples=40)
    @given(
        value=st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.just("OOM")),
        quantity=st.sampled_from(sorted(UNITS)),
        extra=st.dictionaries(
            st.text(min_size=1).map(lambda key: "x" + key),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
                | st.text(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
    )
    def test_a_line_gives_the_record_back(self, value, quantity, extra):
        record = make(value=value, quantity=quantity, extra=extra)
        line = record.to_json()
        assert "\n" not in line
        assert Record.from_json(line) == record

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"method": "upip"}, r"method='upip' must be one of local, ulysses, alst, .*frontier"),
            ({"quantity": "memory"}, r"quantity='memory' must be one of peak_memory_gib, .*grad_error"),
            ({"unit": "GB"}, "unit='GB' must be one of GiB"),
            ({"value": float("nan")}, 'value=nan must be a finite number or "OOM"'),
            ({"value": float("inf")}, "value=inf must be"),
            ({"value": True}, "value=True must be"),
            ({"value": "oom"}, "value='oom' must be"),
            ({"value": None}, "value=None must be"),
            ({"published": float("nan")}, "published=nan must be"),
            ({"length_tokens": 0}, "length_tokens=0 must be an integer of at least 1"),
            ({"length_tokens": 2.0}, "length_tokens=2.0 must be"),
            ({"extra": {"step": 1, "value": 3}}, "extra has the keys value, which a record has itself"),
            ({"extra": {"grad_norm": float("nan")}}, "is not JSON .*use numbers that are finite"),
            ({"extra": {"deep": [{"a": float("inf")}]}}, "is not JSON"),
            ({"extra": {"loss": np.float32(1)}}, "is not JSON"),
        ],
    )
    def test_refuses(self, changes, said):
        with pytest.raises(ValueError, match=said):
            make(**changes)

    @pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"experiment": "a"}', '{"value": NaN}'])
    def test_refuses_a_line(self, line):
        with pytest.raises(ValueError, match=r"Expecting|not a record: .*(experiment|model).* missing"):
            Record.from_json(line)

    def test_get(self):
        record = make(extra={"step": 3})
        assert (record.get("step"), record.get("model"), record.get("unit")) == (3, "llama3-8b", "GiB")
        with pytest.raises(ValueError, match=r"a record has no steps; it has experiment, .*step"):
            record.get("steps")


def steps(path, *numbers):
    file = RecordFile(path)
    for number in numbers:
        file.append(make(value=number + 0.5, extra={"step": number}))
    return file


class TestRecordFile:
    def test_appends_and_reads(self, tmp_path):
        file = RecordFile(tmp_path / "records.jsonl")
        assert file.read() == []
        written = [make(value=value) for value in (1, 2.5, "OOM")]
        for record in written:
            file.append(record)
        assert RecordFile(file.path).read() == written

    def test_a_torn_end_is_no_record_and_is_cut_before_the_next(self, tmp_path):
        file = steps(tmp_path / "r.jsonl", 1, 2)
        whole = file.path.read_bytes()
        second = whole.index(b"\n") + 1
        # Killed after any byte of the second line, its end included.
        for size in range(second, len(whole) + 1):
            file.path.write_bytes(whole[:size])
            left = [1, 2] if size == len(whole) else [1]
            assert [record.get("step") for record in file.read()] == left
            file.append(make(extra={"step": 3}))
            assert [record.get("step") for record in file.read()] == [*left, 3]

    def test_an_append_that_does_not_cut_is_caught(self, tmp_path):
        file = steps(tmp_path / "r.jsonl", 1, 2)
        torn = file.path.read_bytes()[:-9]
        file.path.write_bytes(torn + make().to_json().encode() + b"\n")
        with pytest.raises(ValueError, match=r"r\.jsonl:2: "):
            file.read()

    def test_a_torn_first_line(self, tmp_path):
        file = RecordFile(tmp_path / "r.jsonl")
        file.path.write_bytes(b'{"experi')
        assert file.read() == []
        file.append(make())
        assert file.read() == [make()]

    def test_a_kill_keeps_what_was_appended(self, tmp_path):
        code = (
            "import os, sys; from pathlib import Path; from tests.experiments.test_records import steps\n"
            "file = steps(Path(sys.argv[1]), 1, 2)\n"
            "os.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r.jsonl")], cwd=Path(__file__).parents[2])
        assert done.returncode == -9
        assert [record.get("step") for record in RecordFile(tmp_path / "r.jsonl").read()] == [1, 2]

    def test_a_broken_line_in_the_middle_raises(self, tmp_path):
        file = steps(tmp_path / "r.jsonl", 1, 2, 3)
        lines = file.path.read_bytes().splitlines(keepends=True)
        file.path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
        with pytest.raises(ValueError, match=r"r\.jsonl:2: .*remove the line"):
            file.read()

    def test_truncate_after_keeps_earlier_steps_and_records_without_one(self, tmp_path):
        file = steps(tmp_path / "r.jsonl", 1, 2, 3, 4)
        file.append(make(value=9))
        file.truncate_after(2)
        assert [record.value for record in file.read()] == [1.5, 2.5, 9]
        assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
        RecordFile(tmp_path / "none.jsonl").truncate_after(2)
        assert not (tmp_path / "none.jsonl").exists()

    def test_keep_only_interrupted_changes_nothing(self, tmp_path, monkeypatch):
        file = steps(tmp_path / "r.jsonl", 1, 2, 3)
        before = file.path.read_bytes()
        with pytest.raises(ZeroDivisionError):
            file.keep_only(lambda record: 1 / (record.extra["step"] - 2) > 0)
        assert file.path.read_bytes() == before

        def fail(_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(KeyboardInterrupt):
            file.truncate_after(1)
        assert file.path.read_bytes() == before


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


class TestOrigin:
    def test_versions_are_those_installed(self):
        import torch

        found = versions()
        assert found["torch"] == torch.__version__
        assert found["numpy"] == np.__version__
        assert found["python"] == sys.version.split()[0]
        assert "upipe" in found
        assert "flash-attn" not in found or found["flash-attn"][0].isdigit()

    def test_versions_without_the_package(self, monkeypatch):
        monkeypatch.setattr(module, "PACKAGES", ("no-such-package",))
        monkeypatch.setattr(module, "OPTIONAL_PACKAGES", ("neither-this-one",))
        assert list(versions().items())[1:] == [("no-such-package", "not installed")]

    def test_commit(self, tmp_path, monkeypatch):
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert commit(tmp_path) == "unknown"
        git(tmp_path, "init")
        assert commit(tmp_path) == "unknown"
        (tmp_path / "upipe").mkdir()
        (tmp_path / "upipe" / "a.py").write_text("1")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", "one")
        clean = commit(tmp_path)
        assert len(clean) == 40
        assert int(clean, 16) > 0
        (tmp_path / "notes.md").write_text("not a source")
        assert commit(tmp_path) == clean
        (tmp_path / "upipe" / "b.py").write_text("2")
        assert commit(tmp_path) == clean + "+dirty"
        # An installation below somebody else's checkout.
        assert commit(tmp_path / "upipe") == "unknown"

    def test_commit_without_git(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert commit() == "unknown"


class TestOpenOutput:
    def test_makes_the_folder_and_leaves_it_empty(self, tmp_path):
        assert open_output(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
        assert open_output(tmp_path / "a" / "b").is_dir()
        assert list((tmp_path / "a" / "b").iterdir()) == []

    @pytest.mark.parametrize("below", ["", "/deeper"])
    def test_a_file_in_the_way(self, tmp_path, below):
        (tmp_path / "file").touch()
        path = f"{tmp_path}/file{below}"
        with pytest.raises(ValueError, match=rf"out={path}: cannot write {path}: .+; choose another folder"):
            open_output(path)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write")
    @pytest.mark.parametrize("path", ["/proc/self", "/proc/nowhere"])
    def test_a_folder_that_cannot_be_written(self, path):
        with pytest.raises(ValueError, match=f"out={path}: cannot write {path}: .+; choose another folder"):
            open_output(path)


CELLS = [
    make(method="ulysses", length_tokens=3000, value="OOM", published="OOM"),
    make(method="upipe", length_tokens=3000, value=1234.5, published=70),
    make(method="upipe", length_tokens=1000, value=0.000123456, extra={"heads_per_stage": 8}),
]


class TestTables:
    def test_pivot(self):
        header, rows = pivot(CELLS, rows=["length_tokens", "quantity"], columns="method")
        assert header == ["length_tokens", "quantity", "ulysses", "upipe"]
        assert rows == [
            ["3,000", "peak_memory_gib", "OOM (paper OOM)", "1,234 (paper 70)"],
            ["1,000", "peak_memory_gib", "", "0.0001235"],
        ]

    def test_pivot_refuses_two_records_in_a_cell_and_unknown_keys(self):
        with pytest.raises(ValueError, match="two records for model=llama3-8b, method=upipe; select fewer"):
            pivot(CELLS, rows=["model"], columns="method")
        with pytest.raises(ValueError, match="a record has no heads_per_stage"):
            pivot(CELLS, rows=["heads_per_stage"], columns="method")

    def test_table_shows_every_cell_whole(self):
        cells = [*CELLS, make(method="ring", length_tokens=1000, model="[bold]", value=8)]
        for width in (120, 40):
            out = io.StringIO()
            shown = table(cells, rows=["length_tokens", "model"], columns="method", title="Memory")
            Console(file=out, width=width).print(shown)
            text = out.getvalue()
            assert "…" not in text
            assert "Memory" in text
            if width == 120:
                for cell in ("3,000", "OOM (paper OOM)", "1,234 (paper 70)", "0.0001235", "[bold]"):
                    assert cell in text

    def test_markdown(self):
        assert markdown_table(["a", "b|c"], [["1", "x|y"], ["2", ""]]) == (
            "| a | b\\|c |\n| --- | --- |\n| 1 | x\\|y |\n| 2 |  |\n"
        )
        with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
            markdown_table(["a", "b"], [["1"]])
