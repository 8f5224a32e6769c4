"""The layout that DESIGN promises: which module may import which, how long it may be, what may not be there."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_MODULE, LONGEST_COMMAND = 400, 60
# Where torch and its kind may be imported: never in what people install or run.
HEAVY = {"torch", "transformers", "tensorflow"}


def modules(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path):
    """Every module that a file imports, wherever in it; `from a import b` counts as a and as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def is_command(path):
    return "run_guarded(main, sys.argv)" in path.read_text(encoding="utf-8")


def is_in(name, package):
    return name == package or name.startswith(package + ".")


def test_the_reader_of_imports_sees_every_form(tmp_path):
    path = tmp_path / "example.py"
    path.write_text("import a.b\ndef f():\n    from c import d\n")
    assert imports_of(path) == {"a.b", "c", "c.d"}
    path = tmp_path / "relative.py"
    path.write_text("from . import x\n")
    with pytest.raises(AssertionError, match="absolute"):
        imports_of(path)


COMMANDS = [path for path in modules("train") if is_command(path)]
LOSSES = [path for path in modules("smmd_jax") if "backbones" not in path.parts]
ARROWS = [
    *((path, "train") for path in modules("smmd_jax")),
    *((path, "smmd_jax.backbones") for path in LOSSES),
    *((path, "flax") for path in LOSSES),
    *((path, "smmd_jax.losses") for path in modules("smmd_jax/backbones")),
    # The step and what it minimises are pure: no config, no command, no file.
    *((ROOT / "train" / f"{name}.py", f"train.{other}")
      for name in ("step", "objective") for other in ("config", "flags", "loop", "assembly", "checkpoint", "log")),
    *((path, f"train.{other}") for path in modules("train/tasks") for other in ("config", "loop", "main")),
]  # fmt: skip


@pytest.mark.parametrize("path, forbidden", ARROWS, ids=lambda part: part if isinstance(part, str) else name_of(part))
def test_imports_go_one_way(path, forbidden):
    assert not [name for name in imports_of(path) if is_in(name, forbidden)]


def test_backbones_take_no_more_of_the_core_than_the_numeric_vocabulary():
    """Losses and backbones never see each other; a model needs the ids of the numeric columns, and no more."""
    core = ("backbones", "kernels", "numeric_vocab", "errors", "json_files")
    allowed = [f"smmd_jax.{name}" for name in core]
    for path in modules("smmd_jax/backbones"):
        ours = {name for name in imports_of(path) if is_in(name, "smmd_jax")}
        assert all(any(is_in(name, package) for package in allowed) for name in ours), (path, ours)


@pytest.mark.parametrize("package, owner", [("orbax", "train.checkpoint"), ("tokenizers", "train.tokenizer")])
def test_one_module_of_the_trainer_owns_a_library(package, owner):
    users = [name_of(path) for path in modules("train") if any(is_in(name, package) for name in imports_of(path))]
    assert users == [owner]


def test_labels_move_in_one_place():
    names = {"smmd_jax.shift_targets", "smmd_jax.targets.shift_targets"}
    users = [name_of(path) for path in modules("train") if names & imports_of(path)]
    assert users == ["train.encode"]


@pytest.mark.parametrize("path", modules("smmd_jax", "train", "colab", "examples"), ids=name_of)
def test_nothing_that_people_run_needs_torch_or_transformers(path):
    assert not [name for name in imports_of(path) for heavy in HEAVY if is_in(name, heavy)]


@pytest.mark.parametrize("path", modules("smmd_jax", "train"), ids=name_of)
def test_modules_hold_one_idea(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_MODULE
    assert path.stem not in ("utils", "util", "common", "helpers", "misc")
    assert not path.stem.endswith(("_v2", "_new", "_old"))
    assert text.strip() == "" or ast.get_docstring(ast.parse(text)), "a module opens with one sentence on what it holds"


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_commands_parse_and_call(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_COMMAND


def test_the_commands_are_found():
    assert {"train.main", "train.compare"} <= {name_of(path) for path in COMMANDS}


def test_nothing_imports_a_command_but_for_its_tables():
    for path in modules("train"):
        imported = {name for name in imports_of(path) for command in COMMANDS if is_in(name, name_of(command))}
        assert imported <= {"train.main", "train.main.TABLES"} and (not imported or is_command(path)), path


def test_layout_is_two_levels_deep():
    for path in modules("smmd_jax", "train"):
        assert len(path.relative_to(ROOT).parts) <= 3, path


def test_asserts_are_for_tests():
    """`python -O` drops them."""
    for path in modules("smmd_jax", "train"):
        found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not found, (path, found)
