"""Every notebook runs from top to bottom in under a minute, and is stored without outputs."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_S = 60


def execute(notebook: NotebookNode) -> None:
    client = NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()


def leftovers(notebook: NotebookNode) -> list[int]:
    """Return the indices of code cells that keep outputs or an execution count."""
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)
    ]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    started = time.monotonic()
    execute(nbformat.read(path, as_version=4))
    assert time.monotonic() - started < LIMIT_S


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert leftovers(notebook) == []


def test_a_failing_cell_is_noticed() -> None:
    with pytest.raises(CellExecutionError, match=r"AssertionError.*: 2 is not 3"):
        execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 2 == 3, '2 is not 3'")]))


def test_outputs_and_counts_are_noticed() -> None:
    output = nbformat.v4.new_output("stream", text="left over")
    cells = [
        nbformat.v4.new_markdown_cell("text"),
        nbformat.v4.new_code_cell("1"),
        nbformat.v4.new_code_cell("2", outputs=[output]),
        nbformat.v4.new_code_cell("3", execution_count=1),
    ]
    assert leftovers(nbformat.v4.new_notebook(cells=cells)) == [2, 3]
