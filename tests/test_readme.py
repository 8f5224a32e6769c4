"""The pages for readers: every code block runs, every command parses, every table is that of the committed results."""

import doctest
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.report import BLOCKS, PAGES, read_results, render
from benchmarks.run import parse_options
from smmd_jax import KERNELS, LOSSES
from train import inspect_data, plan
from train.compare import USAGE, make_flags
from train.config import parse_command_line
from train.evaluation import EvaluateFlags
from train.exits import EXIT_CODES
from train.export import ExportFlags
from train.flags import check_names, parse_flags
from train.gguf_models import WHEEL
from train.main import TABLES
from train.plan_config import PlanConfig, complete
from train.preview import MARKS_LEGEND

ROOT = Path(__file__).parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(path, *languages):
    return [text for language, text in FENCE.findall(path.read_text(encoding="utf-8")) if language in languages]


def of(*languages):
    """The pages that have a block in one of these languages."""
    return pytest.mark.parametrize("path", [p for p in TEXTS if blocks(p, *languages)], ids=lambda path: path.name)


def commands(text):
    for line in text.replace("\\\n", " ").splitlines():
        for command in line.split("&&"):
            if command.strip() and not command.strip().startswith("#"):
                yield shlex.split(command)


@of("python")
def test_python_blocks_run_one_after_the_other(path):
    namespace = {}
    for text in blocks(path, "python"):
        exec(compile(text, f"{path.name}", "exec"), namespace)
    if path == README:
        assert float(namespace["paper_mean"]) > 0 and namespace["loss"].shape == (32,)


def test_the_first_example_of_the_readme_learns():
    namespace = {}
    first = blocks(README, "python")[0]
    exec(compile(first.replace("range(20)", "range(1)"), "README", "exec"), namespace)
    begin = float(namespace["loss"])
    exec(compile(first, "README", "exec"), namespace)
    assert float(namespace["loss"]) < begin / 2


@of("pycon")
def test_examples_with_output_are_true(path):
    text = "\n".join(blocks(path, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


@of("bash")
def test_commands_parse(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for text in blocks(path, "bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        for program, *rest in commands(text):
            if program == "pip":
                *_, what = rest
                if rest == ["install", "--no-deps", WHEEL]:
                    continue
                extras = re.fullmatch(r"\.(?:\[([a-z0-9,-]+)\])?", what)
                assert extras, what
                assert set((extras[1] or "").split(",")) - {""} <= project["optional-dependencies"].keys()
            elif program == "pytest":
                assert not rest or (rest[0] == "-m" and rest[1] in ("", *(line.split(":")[0] for line in markers)))
            else:
                assert program == "python" and rest[0] == "-m"
                check_command(rest[1], rest[2:])


def test_what_a_command_takes_another_of_the_pages_makes():
    """Runs that are exported or evaluated are trained somewhere, and hold the checkpoint that is asked for."""
    runs, exported, users = {}, set(), []
    for program, *rest in (command for path in TEXTS for text in blocks(path, "bash") for command in commands(text)):
        if program != "python" or rest[1] not in ("train.main", "train.export", "train.evaluate"):
            continue
        module, flags = rest[1], rest[1:]
        if module == "train.main":
            if not {"--help", "--dry_run"} & set(flags):
                config = parse_command_line(flags, tables=TABLES)
                assert runs.setdefault(config.workdir, config) == config, f"two runs in {config.workdir}"
        else:
            kind = ExportFlags if module == "train.export" else EvaluateFlags
            users.append(kind(**parse_flags(kind, flags, tables={}, usage=USAGE)))
            exported |= {users[-1].out} if kind is ExportFlags else set()
    assert len(users) >= 8
    for user in users:
        if not user.workdir:
            assert getattr(user, "backbone", "") in {*exported, ""}
            continue
        config = runs[user.workdir]
        saved = [*range(config.checkpoint_every, config.steps, config.checkpoint_every), config.steps]
        assert user.step is None or user.step in saved[-config.keep_checkpoints :], (user, saved)
        if getattr(user, "adapter", False):
            assert config.lora_rank and config.backbone != "tiny"


@of("shell")
def test_commands_within_scripts_parse(path):
    """Scripts of clusters: whatever stands around them, the commands of this project are right."""
    for text in blocks(path, "shell"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        found = re.findall(r"python -m ((?:train|benchmarks)\.\w+)((?: +--[^\s\"]+)*)", text.replace("\\\n", " "))
        assert len(found) + text.count("python -m pytest ") == text.count("python -m ") > 0
        for module, flags in found:
            check_command(module, flags.split())


def check_command(module, flags):
    if module == "train.main":
        if "--help" not in flags:
            parse_command_line([module, *flags], tables=TABLES)
    elif module == "train.compare":
        parse_flags(make_flags(), [module, *flags], tables=TABLES, usage=USAGE)
    elif module == "train.export":
        parse_flags(ExportFlags, [module, *flags], tables={}, usage=USAGE)
    elif module == "train.inspect_data":
        parse_flags(inspect_data.make_flags(), [module, *flags], tables=TABLES, usage=USAGE)
    elif module == "train.evaluate":
        EvaluateFlags(**parse_flags(EvaluateFlags, [module, *flags], tables={}, usage=USAGE))
    elif module == "train.plan":
        given = parse_flags(PlanConfig, [module, *flags], tables=plan.TABLES, usage=plan.USAGE)
        check_names(given, PlanConfig, tables=plan.TABLES)
        complete(given)
    elif module == "benchmarks.scale_table":
        assert not flags
    elif module == "benchmarks.run":
        parse_options(flags)
    else:
        assert module == "benchmarks.report", f"no check is known for {module}"


@pytest.mark.parametrize("page", ["training.md", "tasks.md"])
def test_the_marks_of_tokens_are_explained_in_the_words_of_the_program(page):
    assert f"({MARKS_LEGEND})" in " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def test_a_command_with_a_flag_that_does_not_exist_is_noticed():
    with pytest.raises(ValueError, match="did you mean --sigma"):
        check_command("train.main", ["--task=arith", "--sigmas=1"])


def test_the_readme_has_the_two_commands_that_set_everything_up():
    shell = [text.strip() for text in blocks(README, "bash")]
    assert "pip install -e '.[train]' && python -m train.main --task=arith" in shell
    assert "pip install -e '.[test]' && pytest" in shell


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_flags_named_in_the_text_exist(path):
    kinds = (make_flags(), inspect_data.make_flags(), ExportFlags, EvaluateFlags, PlanConfig)
    known = {field for kind in kinds for field in kind.__dataclass_fields__}
    known |= {"loss", "seed", "print_config", "dry_run", "help", "losses", "seeds", "report_only"}
    known |= vars(parse_options([])).keys()
    named = set(re.findall(r"`--([a-z_]+)", path.read_text(encoding="utf-8")))
    assert named <= known, named - known


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_loss_and_kernel_is_explained():
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (add|scale to CE|replace CE|is CE) \| ([0-9.]+) \|", text, re.MULTILINE)
    joins = {name: (join, float(weight)) for name, join, weight in rows}
    words = {"add": "add", "scale_to_ce": "scale to CE", "replace_ce": "replace CE"}
    expected = {name: (words[spec.join], spec.default_weight) for name, spec in LOSSES.items()}
    assert joins == {**expected, "ce": ("is CE", 1.0)}
    assert all(f"`{name}`" in text for name in KERNELS)
    assert all(f"`{name}`" in README.read_text(encoding="utf-8") for name in [*LOSSES, *KERNELS])


def test_every_exit_code_is_explained():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    listed = {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}
    assert listed.keys() == EXIT_CODES.keys()
    assert all(listed[code].startswith(EXIT_CODES[code].split(":")[0].split(",")[0]) for code in EXIT_CODES)


def test_the_tables_are_those_of_the_committed_results():
    """If this fails: python -m benchmarks.report."""
    results = read_results()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert render(text, results) == text, f"{page.name} is out of date"


COMPARISON = {
    "command": "python -m train.compare --task=arith", "task": "arith", "backbone": "tiny", "split": "interpolate",
    "steps": 1000, "batch_size": 64, "examples": [200],
    "summary": {"ce": {"n": 2, "metrics": {
        "accuracy": {"mean": 0.915, "deviation": 0.01}, "mae": {"mean": 1.25, "deviation": 0.5},
        "median_error": {"mean": 0.0, "deviation": 0.0}, "r2": {"mean": None, "deviation": None},
        "parse_failures": {"mean": 0.5, "deviation": 0.7}, "minutes": {"mean": 6.3, "deviation": 0.1}}}},
    "differences": {},
    "cells": [{"loss": "ce", "seed": 0, "state": "finished", "versions": None, "machine": {},
               "command": "python -m train.main --task=arith --loss=ce --seed=0 --workdir=runs/x/ce-seed0"}],
}  # fmt: skip
COST = {"command": "python -m benchmarks.loss_cost", "machine": {"cpu": 2}, "rows": [{"loss": "smmd", "ratio": 1.0123}]}


def test_the_writer_fills_every_block_from_the_json(tmp_path):
    for name, result in (("arith", COMPARISON), ("loss_cost", COST)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    page = "".join(f"<!-- results: {name} -->\nstale\n<!-- end of results -->\n" for name in BLOCKS)
    text = render(page, read_results(tmp_path))
    assert "stale" not in text
    row = "| arith, tiny | ce | 2 | 91.50 ± 1.00 | 1.250 ± 0.500 | 6.3 ± 0.1 |"
    assert f"{row} `python -m train.main --task=arith --loss=ce` |" in text
    assert "### arith" in text and "| ce | 2 | 91.50 ± 1.00 | 1.250 ± 0.500 | 0.00 ± 0.00 | - |" in text
    assert "| smmd | 1.012 |" in text and "Machine: cpu 2" in text
    assert render(text, read_results(tmp_path)) == text


def test_a_page_with_a_block_of_another_name_is_refused():
    with pytest.raises(ValueError, match="known: comparisons, summary, benchmarks"):
        render("<!-- results: sumary -->\n<!-- end of results -->", {})
    with pytest.raises(ValueError, match="no <!-- results"):
        render("a page", {})
