"""The notebooks: the .ipynb is its .py source without outputs, it defines nothing, and it runs from top to bottom."""

import ast
import os
import re
from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest
from flax import nnx

from smmd_jax.backbones import Decoder, DecoderConfig, load_pretrained, save_pretrained
from train.flags import parse_flags
from train.plan import TABLES
from train.plan_config import PlanConfig, complete
from train.tokenizer import make_task_tokenizer

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "colab").glob("*.py"))
notebooks = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]


def read(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_the_notebooks_are_found():
    assert {"smmd_quickstart", "finetune_tpu"} == {path.stem for path in SOURCES}


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


def executed(source, tmp_path, monkeypatch, **parameters):
    """Run a notebook with other parameters; gives its printed text and its pictures."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(source)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    known = {node.targets[0].id for node in ast.parse(cell.source).body}
    assert parameters.keys() <= known
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    return "".join(output.get("text", "") for output in outputs), images


TINY = {"STEPS": 2, "BATCH_SIZE": 2, "EVAL_EXAMPLES": 4}


@pytest.mark.slow
def test_the_quick_start_runs_from_top_to_bottom(tmp_path, monkeypatch):
    text, images = executed(
        ROOT / "colab" / "smmd_quickstart.py", tmp_path, monkeypatch, WORKDIR=str(tmp_path / "run"), **TINY
    )
    assert "10 numeric of 12 tokens" in text and "SMMD on the two text tokens: [0. 0.]" in text
    assert "last logged step 2" in text
    assert len(images) >= 3 + 2  # drawn here, and from the run folder


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2], ids=["all parameters", "adapters"])
def test_fine_tuning_runs_from_a_folder_of_weights_to_one(rank, tmp_path, monkeypatch):
    tokenizer = make_task_tokenizer()
    config = DecoderConfig(
        model_type="qwen2", vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_layers=2,
        num_heads=2, num_kv_heads=1, qkv_bias=True,
    )  # fmt: skip
    save_pretrained(Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "weights")
    tokenizer.save(tmp_path / "weights")
    text, images = executed(
        ROOT / "colab" / "finetune_tpu.py", tmp_path, monkeypatch,
        PLATFORM="cpu", WEIGHTS=str(tmp_path / "weights"), LORA_RANK=rank, WORKDIR=str(tmp_path / "run"),
        OUT=str(tmp_path / "out"), **TINY,
    )  # fmt: skip
    assert "last logged step 2" in text and "verified: " in text and len(images) >= 2
    assert load_pretrained(tmp_path / "out").config == config
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_fine_tuning_stops_on_another_platform_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="PLATFORM is 'tpu' and jax runs on 'cpu'"):
        executed(ROOT / "colab" / "finetune_tpu.py", tmp_path, monkeypatch)


def test_installing_leaves_the_jax_of_the_runtime_alone():
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        assert '("jax", "jaxlib", "numpy")' in text and '"-c", "constraints.txt"' in text and "[train]" in text


def test_the_memory_claim_of_fine_tuning_is_planned_with_its_own_parameters():
    text = (ROOT / "colab" / "finetune_tpu.py").read_text(encoding="utf-8")
    plans = re.findall(r"python -m (train\.plan .*)", text)
    assert len(plans) == 2
    batch_size, max_length = (
        int(re.search(rf"^{name} = (\d+)", text, re.M)[1]) for name in ("BATCH_SIZE", "MAX_LENGTH")
    )
    for plan in plans:
        config = complete(parse_flags(PlanConfig, plan.split(), tables=TABLES, usage=""))
        assert (config.topology, config.batch_size, config.max_length) == ("v5e:1x1", batch_size, max_length)
        # What the cell for a TPU passes is what a plan assumes.
        assert (config.dtype, config.scan_layers, config.remat) == ("bfloat16", True, "full")
    assert 'flags = ["--dtype=bfloat16", "--scan_layers", "--remat=full"]' in text
