"""README.md: its example runs, its tables are those of the records, its commands are what .ci/run takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from experiments.figures import RECORDS, readme_tables, with_tables
from experiments.records import RecordFile

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_every_block_is_a_command_or_runs() -> None:
    """Commands run whole in .ci/run; here the example runs in an interpreter of its own."""
    blocks = re.findall(r"<!-- (\S+?:? ?\w*) -->\n```(\w+)\n(.*?)```", README, flags=re.S)
    assert [name for name, _, _ in blocks] == ["command: train", "command: test", "example"]
    assert README.count("```") == 2 * len(blocks)
    example = blocks[-1][2]
    assert len(example.splitlines()) <= 16
    run = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    plain, chunked = (float(size) for size in re.findall(r"Attention: ([\d.]+) MiB", run.stdout))
    assert chunked < plain


def test_tables_are_those_of_the_records() -> None:
    tables = readme_tables(RecordFile(RECORDS).read())
    assert all(len(table.splitlines()) > 3 for table in tables.values())
    assert with_tables(README, tables) == README


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_takes_the_commands_from_here() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command test" in script
    assert "readme_command train" in script
