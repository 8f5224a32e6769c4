"""The notebooks: the .ipynb is its .py source without outputs, it defines nothing, and it runs from top to bottom."""

import ast
import os
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "colab").glob("*.py"))
notebooks = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]


def read(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_is_a_notebook():
    assert "smmd_quickstart" in [path.stem for path in SOURCES]


@notebooks
def test_the_notebook_is_its_source(source):
    """If this fails: jupytext --to ipynb colab/*.py."""
    notebook = read(source)
    assert cells(notebook) == cells(jupytext.read(source))
    assert notebook.metadata.kernelspec.name == "python3"
    nbformat.validate(notebook)


@notebooks
def test_the_notebook_holds_no_outputs(source):
    for cell in read(source).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@notebooks
def test_the_notebook_imports_and_defines_no_loss_or_model(source):
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    assert not [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert defined <= {"step", "total"}


@notebooks
def test_the_notebook_has_one_cell_of_parameters(source):
    tagged = [cell for cell in read(source).cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    body = ast.parse(tagged[0].source).body
    assert all(isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) for node in body)


@pytest.mark.slow
@notebooks
def test_the_notebook_runs_from_top_to_bottom(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(source)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source += f"\nSTEPS = 2\nBATCH_SIZE = 2\nEVAL_EXAMPLES = 4\nWORKDIR = {str(tmp_path / 'run')!r}"
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "10 numeric of 12 tokens" in text and "SMMD on the two text tokens: [0. 0.]" in text
    assert "last logged step 2" in text
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) >= 3 + 2  # drawn here, and from the run folder
    assert not [output for output in outputs if output.output_type == "error"]
