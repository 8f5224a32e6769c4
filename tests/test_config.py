"""Config and command line: who beats whom, what is refused and in which words, what a resume may change."""

import dataclasses
import json
import types

import pytest

from train.config import (
    TrainConfig,
    check_run_folder,
    config_from_json,
    config_to_json,
    differences,
    make_config,
    parse_command_line,
    parse_mesh,
    resume_differences,
    save_config,
)
from train.exits import StorageError, UsageError

ARITH = types.SimpleNamespace(
    summary="integer sums",
    defaults={"steps": 300, "learning_rate": 2e-3, "warmup_steps": 50},
    variants=("small", "large"),
    splits=("train", "interpolate"),
    eval_split="interpolate",
)
TABLES = {
    "task": {"arith": ARITH, "clock": types.SimpleNamespace(summary="dials", defaults={})},
    "loss": ("ce", "smmd", "ntl_was"),
    "kernel": ("rbf", "laplace"),
    "optimizer": ("adamw", "sgd"),
}
# The same task, whose variants have a use for some options of the data.
OPTIONS = {**TABLES, "task": {"arith": types.SimpleNamespace(
    **vars(ARITH), options={"data_seed": ("small", "large"), "limit": ("small",)})}}  # fmt: skip
FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]


def parse(*flags):
    return parse_command_line(["main", *flags], tables=TABLES)


def test_an_explicit_flag_beats_the_task_which_beats_the_default():
    default = TrainConfig(task="arith")
    assert parse("--task=clock").steps == default.steps
    assert parse("--task=arith").steps == 300
    assert parse("--task=arith", "--steps=7").steps == 7


def test_a_flag_given_with_the_default_value_still_beats_the_task():
    default = TrainConfig(task="arith")
    config = parse("--task=arith", f"--steps={default.steps}", "--warmup_steps=none")
    assert config.steps == default.steps != 300
    assert config.warmup_steps is None


def test_every_way_of_writing_a_flag():
    config = parse("--task", "arith", "-steps=5", "--tensorboard", "--nodebug", "--sigma=1,2.5", "--loss_weight=0")
    assert (config.steps, config.tensorboard, config.debug, config.sigma) == (5, True, False, (1.0, 2.5))
    assert config.loss_weight == 0.0 and config.alpha is None
    assert parse("--task=arith", "--steps=5", "--steps=6").steps == 6


def test_empty_choices_are_resolved_from_the_task_and_the_folder_from_the_config():
    config = parse("--task=arith", "--seed=3")
    assert (config.variant, config.eval_split) == ("small", "interpolate")
    assert config.workdir == "runs/arith-tiny-smmd-seed3"
    assert parse("--task=arith", "--loss=my.losses:huber").workdir == "runs/arith-tiny-my.losses-huber-seed0"
    assert parse("--task=arith", "--backbone=../models/a b").workdir == "runs/arith-a-b-smmd-seed0"


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--learning_rte=1e-4", "--learning_rte is not a flag; did you mean --learning_rate?"),
        ("--learning-rate=1e-4", "did you mean --learning_rate?"),
        ("--zzz=1", "--zzz is not a flag. --help lists all"),
        ("--task=arit", "did you mean arith? Known: arith, clock."),
        ("--loss=smd", "did you mean smmd? Known: ce, smmd, ntl_was, or package.module:function"),
        ("--loss=a:b:c", "not known"),
        ("--optimizer=adam", "Known: adamw, sgd."),
        ("--variant=huge", "Known: small, large."),
        ("--eval_split=test", "Known: train, interpolate."),
        ("--normalize_by=rows", "wanted one of numeric, tokens"),
        ("--platform=cuda", "cpu, gpu, tpu"),
        ("--dtype=float16", "wanted one of float32, bfloat16"),
        ("--remat=all", "wanted one of none, full, dots"),
        ("--lora_rank=-1", "lora_rank=-1: wanted a whole number of at least 0"),
        ("--lora_alpha=0", "lora_alpha=0.0: wanted a finite number above 0"),
        ("--steps=0", "steps=0: wanted a whole number of at least 1"),
        ("--steps=1e3", "steps=1e3: wanted a whole number"),
        ("--lora_rank=99999999999999999999", "wanted a whole number of at most 4,294,967,296"),
        ("--batch_size=99999999999999", "batch_size=99999999999999: wanted a whole number of at most"),
        ("--steps=1_000", "wanted a whole number"),
        ("--steps=", "steps=: wanted a whole number"),
        ("--steps", "steps"),
        ("--seed=-1", "at least 0"),
        ("--seed=4294967296", "below 4294967296"),
        ("--learning_rate=-1", "learning_rate=-1.0: wanted a finite number above 0"),
        ("--learning_rate=nan", "learning_rate=nan: wanted a finite number"),
        ("--learning_rate=inf", "learning_rate=inf: wanted a finite number"),
        ("--learning_rate=0", "above 0"),
        ("--dropout=1", "below 1"),
        ("--sigma=0", "sigma=0.0"),
        ("--sigma=1,nan", "wanted finite numbers"),
        ("--sigma=", "wanted finite numbers"),
        ("--alpha=-0.1", "at least 0"),
        ("--tensorboard=maybe", "tensorboard=maybe: wanted true or false"),
        ("--grad_accum=7", "multiple"),
        ("--mesh=data:0", "'data:0' was not understood"),
        ("--mesh=model:2", "data, fsdp, tensor"),
        ("--mesh=data:2,data:2", "at most once"),
        ("--workdir=gs://bucket/run", "workdir is a URL"),
        ("arith", "did you mean --task=arith?"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_with_exit_code_2(flag, words):
    with pytest.raises(UsageError) as caught:
        parse("--task=arith", flag)
    assert words in str(caught.value) and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_missing_task_lists_the_tasks():
    with pytest.raises(UsageError, match=r"--task is required. Known: arith, clock\."):
        parse()


def test_help_lists_every_flag_with_meaning_choices_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name}\n" in text or f"--[no]{field.name}\n" in text
        assert field.metadata["help"] in words
    assert "Default: 1000 (arith 300)." in words and "One of ce, smmd, ntl_was, or package.module:function" in words
    assert "arith: integer sums" in words and max(map(len, text.splitlines())) <= 100


def test_print_config_prints_the_config_of_the_run_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--task=arith", "--print_config", "--sigma=1,2")
    assert caught.value.code == 0
    assert config_from_json(capsys.readouterr().out) == parse("--task=arith", "--sigma=1,2")


def test_json_gives_back_an_equal_config_and_refuses_other_fields():
    config = parse("--task=arith", "--sigma=1,2", "--alpha=0.5")
    assert config_from_json(config_to_json(config)) == config
    values = json.loads(config_to_json(config))
    for changed in ({**values, "new": 1}, {"steps": 5}, [1], {**values, "steps": 0}):
        with pytest.raises(UsageError):
            config_from_json(json.dumps(changed))
    with pytest.raises(UsageError, match="not a config"):
        config_from_json("{")


@pytest.mark.parametrize("value", [True, 2.0, "5", None])
def test_values_of_another_type_are_refused_in_python_too(value):
    with pytest.raises(UsageError, match="steps="):
        TrainConfig(task="arith", steps=value)


def test_make_config_refuses_unknown_fields_and_tasks_that_set_them():
    with pytest.raises(UsageError, match="did you mean steps"):
        make_config({"task": "arith", "step": 3}, tables=TABLES)
    wrong = {"task": {"arith": types.SimpleNamespace(defaults={"learning_rte": 1.0})}}
    with pytest.raises(TypeError, match="learning_rte"):
        make_config({"task": "arith"}, tables=wrong)


def test_an_option_of_the_data_that_would_have_no_effect_is_refused():
    config = make_config({"task": "arith", "data_seed": 3, "limit": 5}, tables=OPTIONS)
    assert (config.data_seed, config.limit, config.max_bad_lines) == (3, 5, None)
    for given, words in [
        ({"limit": 5, "variant": "large"}, r"limit=5 has no effect on task arith, variant large: .*\(.* for small\)"),
        ({"max_bad_lines": 0}, "max_bad_lines=0 has no effect on task arith, variant small: .* none of its variants"),
    ]:
        with pytest.raises(UsageError, match=words):
            make_config({"task": "arith", **given}, tables=OPTIONS)
    assert make_config({"task": "arith", "data_seed": 0, "variant": "large"}, tables=OPTIONS).data_seed == 0


def test_mesh_is_read_in_the_order_given():
    assert list(parse_mesh("fsdp:4,data:2").items()) == [("fsdp", 4), ("data", 2)]
    assert parse_mesh("") == {}


def test_pretrained_weights_have_defaults_of_their_own():
    tables = {"task": {"sums": types.SimpleNamespace(
        defaults={"steps": 300, "batch_size": 16}, pretrained_defaults={"steps": 30})}}  # fmt: skip
    made = lambda **given: make_config({"task": "sums", **given}, tables=tables)
    assert (made().steps, made(backbone="tiny").steps) == (300, 300)
    assert (made(backbone="some/folder").steps, made(backbone="some/folder").batch_size) == (30, 16)
    assert made(backbone="some/folder", steps=7).steps == 7


def test_warmup_defaults_to_a_tenth_of_the_steps_and_at_most_100():
    resolved = [TrainConfig(task="arith", steps=steps).warmup for steps in (5, 200, 5000)]
    assert resolved == [0, 20, 100]
    assert TrainConfig(task="arith", warmup_steps=7).warmup == 7


def test_parameters_are_stored_in_float32_unless_asked_for_or_frozen():
    assert TrainConfig(task="arith").stored_dtype == "float32"
    assert TrainConfig(task="arith", param_dtype="bfloat16").stored_dtype == "bfloat16"
    assert TrainConfig(task="arith", lora_rank=4).stored_dtype == "bfloat16"
    assert TrainConfig(task="arith", lora_rank=4, param_dtype="float32").stored_dtype == "float32"


RESUMABLE = {
    "mesh": "data:2",
    "platform": "cpu",
    "logits": "chunked",
    "distributed": "auto",
    "coordinator": "node-0:8476",
    "num_processes": 2,
    "process_id": 1,
    "join_timeout": 3,
    "peer_timeout": 3,
    "stall_timeout": 3,
    "steps": 77,
    "log_every": 3,
    "eval_every": 3,
    "eval_examples": 3,
    "eval_split": "train",
    "eval_batch_size": 3,
    "checkpoint_every": 3,
    "keep_checkpoints": 7,
    "tensorboard": True,
    "max_dropped_fraction": 0.5,
    "debug": True,
    "print_config": True,
    "dry_run": True,
    "workdir": "elsewhere",
    "data_dir": "elsewhere",
    "allow_data_change": True,
    "max_bad_lines": 3,
}
OTHER = {
    "dtype": "bfloat16", "param_dtype": "bfloat16", "scan_layers": True, "remat": "full", "lora_rank": 4,
    "lora_alpha": 1.0, "lora_targets": "q_proj", "vision": "freeze", "image_size": 64,
    "task": "clock", "variant": "large", "data_seed": 3, "limit": 3, "backbone": "b", "dropout": 0.1,
    "max_length": 99, "loss": "ce",
    "loss_weight": 1.0, "kernel": "laplace", "sigma": 1.0, "alpha": 1.0, "rescale": 9.0, "normalize_by": "tokens",
    "numeric_policy": "digits", "batch_size": 8, "grad_accum": 2, "seed": 1, "optimizer": "sgd", "learning_rate": 1.0,
    "schedule": "linear", "warmup_steps": 1, "weight_decay": 0.0, "clip_norm": 0.0,
}  # fmt: skip


def test_the_two_tables_of_this_test_name_every_field():
    assert sorted([*RESUMABLE, *OTHER]) == sorted(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_resume_may_change(name):
    before = make_config({"task": "arith"}, tables=TABLES)
    after = dataclasses.replace(before, **{name: {**RESUMABLE, **OTHER}[name]})
    lines = resume_differences(json.loads(config_to_json(before)), after)
    assert [line.split(":")[0] for line in lines] == ([] if name in RESUMABLE else [name])


def test_allow_data_change_frees_what_the_data_are_only():
    before = json.loads(config_to_json(make_config({"task": "arith"}, tables=TABLES)))
    given = {"task": "arith", "variant": "large", "allow_data_change": True}
    assert resume_differences(before, make_config(given, tables=TABLES)) == []
    assert len(resume_differences(before, make_config({**given, "seed": 1}, tables=TABLES))) == 1
    other = make_config({**given, "variant": "small", "data_seed": 1, "limit": 5}, tables=OPTIONS)
    assert resume_differences(before, other) == []
    assert len(resume_differences(before, dataclasses.replace(other, allow_data_change=False))) == 2


def test_a_run_folder_refuses_another_config_with_a_diff(tmp_path):
    given = {"task": "arith", "workdir": str(tmp_path / "run")}
    config = make_config(given, tables=TABLES)
    assert check_run_folder(config) is False and not (tmp_path / "run").exists()
    save_config(config)
    assert config_from_json((tmp_path / "run" / "config.json").read_text()) == config
    assert check_run_folder(make_config({**given, "steps": 9}, tables=TABLES)) is True
    with pytest.raises(UsageError, match=r"(?s)learning_rate: 0\.002 -> 0\.1.*seed: 0 -> 1.*--workdir") as caught:
        check_run_folder(make_config({**given, "seed": 1, "learning_rate": 0.1}, tables=TABLES))
    assert "steps" not in str(caught.value)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not readable"):
        check_run_folder(config)


def test_a_field_that_an_earlier_version_did_not_have_stands_for_its_default():
    config = make_config({"task": "arith", "clip_norm": 2.0}, tables=TABLES)
    saved = json.loads(config_to_json(config))
    del saved["clip_norm"]
    assert config_from_json(json.dumps(saved)).clip_norm == 1.0
    assert resume_differences({**saved, "old": 1}, config) == ["clip_norm: 1.0 -> 2.0", "old: 1 -> (absent)"]
    assert resume_differences(saved, dataclasses.replace(config, clip_norm=1.0)) == []


def test_a_run_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--workdir"):
        save_config(make_config({"task": "arith", "workdir": str(tmp_path / "file" / "run")}, tables=TABLES))


def test_differences_are_sorted_and_show_json():
    assert differences({"b": [1], "a": None}, {"b": [2], "c": "x"}) == [
        "a: null -> (absent)",
        "b: [1] -> [2]",
        'c: (absent) -> "x"',
    ]


def test_the_home_folder_may_be_written_as_a_shell_does(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = parse("--task=arith", "--workdir=~/runs/first", "--data_dir=~")
    assert (config.workdir, config.data_dir) == ("/home/somebody/runs/first", "/home/somebody")
