"""Training with images: what a batch holds, what is left out, which parameters move, and that runs go on exactly."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import load_pretrained
from tests import pictures
from tests.pictures import COUNTS, PREPROCESSORS, Squares, make_folder, make_task
from tests.runs import captured, contents, numbers_of, rows_of, same_state, state_of, train_here
from train.assembly import assemble
from train.backbone import make_backbone
from train.config import TrainConfig, parse_command_line
from train.data import make_batches
from train.encode import encode, encode_source
from train.evaluation import EvaluateFlags, evaluate
from train.exits import DataError, UsageError
from train.hf_folder import export
from train.main import TABLES
from train.prompts import make_prompt_batches
from train.scoring import answer_prompts
from train.tasks import TASKS
from train.tasks.base import Example

FLAGS = ("--task=squares", "--backbone=tiny-vlm", "--steps=6", "--batch_size=4", "--max_length=24", "--image_size=32",
         "--eval_examples=8", "--eval_batch_size=4", "--checkpoint_every=3", "--log_every=1")  # fmt: skip


@pytest.fixture(autouse=True)
def squares(monkeypatch):
    pictures.shrink(monkeypatch.setitem)
    monkeypatch.setitem(TASKS, "squares", make_task())


@pytest.fixture
def backbone():
    return make_backbone(TrainConfig(task="squares", backbone="tiny-vlm", image_size=32))


def batches(backbone, source, **more):
    options = dict(batch_size=4, max_length=24, seed=3, vocab_size=backbone.config.vocab_size, images=backbone.images)
    return make_batches(source, backbone.tokenizer, **options | more)


def run_of(*flags):
    argv = ["main", *FLAGS, *flags]
    return assemble(parse_command_line(argv, tables=TABLES))


def test_an_image_comes_first_and_its_tokens_are_never_targets(backbone):
    example = Squares(10)[1]
    ids, supervised = encode(example, backbone.tokenizer, backbone.images)
    names = {token: name for name, token in backbone.tokenizer.special_ids.items()}
    run = [names[token] for token in ids.tolist() if token in names]
    assert run == ["<|vision_start|>", *["<|image_pad|>"] * 4, "<|vision_end|>", "<eos>"]
    assert supervised.tolist() == [False] * 7 + [True, True]
    text, _ = encode(Squares(10)[0], backbone.tokenizer, backbone.images)
    assert backbone.config.image_token_id not in text.tolist()
    with pytest.raises(DataError, match="Example image-1 has an image, and the backbone reads text alone"):
        encode(example, backbone.tokenizer)


def test_a_row_holds_its_own_image_or_several_texts(backbone):
    source, stream = Squares(20), None
    stream = batches(backbone, source)
    seen = set()
    for _ in range(6):
        batch = next(stream)
        assert batch.images.patches.shape[:2] == (4, 1) and batch.positions.shape == (4, 3, 24)
        assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(batch))
        assert not (batch.target_mask & (batch.targets == backbone.config.image_token_id)).any()
        for row, examples in enumerate(stream.examples):
            inside = set(examples[examples >= 0].tolist())
            seen |= inside
            image = source[min(inside)].image
            if image is None:
                assert not batch.images.real[row].any() and (batch.images.order[row] == -1).all()
                assert all(source[index].image is None for index in inside)
                continue
            assert len(inside) == 1
            np.testing.assert_array_equal(batch.images.patches[row, 0], backbone.images.prepare(image).pixels)
            # The image starts at 1 with 2 x 2 features, and the text goes on at 3.
            assert batch.positions[row, :, :7].tolist() == [
                [0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]
            ]  # fmt: skip
    assert seen == set(range(20))
    assert max(len(set(row[row >= 0].tolist())) for row in stream.examples) >= 1


def test_a_stream_goes_on_where_it_was_although_the_next_batch_is_made_ahead(backbone):
    stream = batches(backbone, Squares(20))
    next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    wanted = [next(stream) for _ in range(3)]
    for again in (stream, batches(backbone, Squares(20))):
        again.set_state(state)
        for batch in wanted:
            for found, array in zip(jax.tree.leaves(next(again)), jax.tree.leaves(batch), strict=True):
                np.testing.assert_array_equal(found, array)


def test_images_of_many_sizes_make_few_programs(backbone):
    images = make_backbone(TrainConfig(task="squares", backbone="tiny-vlm", image_size=64)).images
    sizes = [(24 + 3 * i % 70, 24 + 5 * i % 90) for i in range(40)]
    stream = batches(backbone, Squares(40, sizes=sizes, text_every=0), max_length=40, images=images)
    shapes = {next(stream).images.patches.shape for _ in range(20)}
    assert {shape[2] for shape in shapes} <= set(stream.rooms) and len(stream.rooms) <= 4
    assert len({images.run(*size).count("<|image_pad|>") for size in sizes}) > 4


def test_unreadable_images_are_counted_by_reason_and_left_out(backbone):
    source = Squares(40, broken=(1, 2, 3))
    encoded = encode_source(
        source, backbone.tokenizer, max_length=24, max_dropped_fraction=0.1, images=backbone.images
    )
    assert len(encoded) == 37 and encoded.unread_keys == ("image-1", "image-2", "image-3")
    assert encoded.notes == (
        "3 examples are left out because their images cannot be read: 2 empty image, 1 truncated or broken image (for "
        "example image-1, image-2, image-3).",
    )
    with pytest.raises(DataError, match=r"3 of 40 images cannot be read: 2 empty image.*more than the 1.0%"):
        encode_source(source, backbone.tokenizer, max_length=24, images=backbone.images)
    with pytest.raises(DataError, match="4 of 4 examples need more than max_length=5"):
        encode_source(Squares(4, text_every=0), backbone.tokenizer, max_length=5, images=backbone.images)


def test_an_image_that_changed_is_noticed(backbone):
    source = Squares(10, text_every=0)
    stream = batches(backbone, source)
    source.sizes = ((40, 24),)
    with pytest.raises(DataError, match="24 x 40 pixels, and had one of 24 x 24"):
        next(stream)


def test_answers_do_not_depend_on_the_batch(backbone):
    run = run_of()
    model = run.model(run.make_state().parameters)
    source = Squares(9, sizes=((24, 24), (20, 40)))
    found = []
    for size in (1, 4):
        prompts = make_prompt_batches(source, backbone.tokenizer, batch_size=size, images=backbone.images)
        answers = answer_prompts(model, backbone.tokenizer, prompts, max_new_tokens=4)
        found.append({example.key: text for example, text in answers})
    assert found[0] == found[1] and len(found[0]) == 9


def test_the_gradient_does_not_depend_on_micro_batches():
    steps = []
    for flags in ((), ("--grad_accum=2",)):
        run = run_of("--loss=smmd", *flags)
        _, metrics = run.step(run.make_state(), run.place(next(run.batches)), run.kernel, run.frozen)
        steps.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*steps, rtol=1e-5)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="all"),
        pytest.param(("--lora_rank=2", "--vision=lora"), id="adapters"),
    ],
)
@pytest.mark.slow
def test_eight_devices_equal_one(flags):
    found = []
    for mesh in ("", "data:2,fsdp:2,tensor:2"):
        run = run_of(f"--mesh={mesh}", *flags)
        _, metrics = run.step(run.make_state(), run.place(next(run.batches)), run.kernel, run.frozen)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "tower", "text"),
    [
        ((), "all", "all"),
        (("--vision=freeze",), "none", "all"),
        (("--lora_rank=2",), "none", "adapters"),
        (("--lora_rank=2", "--vision=train"), "all", "adapters"),
        (("--lora_rank=2", "--vision=lora"), "adapters", "adapters"),
    ],
)
def test_the_flags_decide_what_is_trained(flags, tower, text):
    run = run_of(*flags)
    leaves = jax.tree_util.tree_leaves_with_path(run.parameters.trainable_like)
    paths = {jax.tree_util.keystr(path) for path, _ in leaves}

    def kind(part: str) -> str:
        own = [path for path in paths if path.startswith(f"['{part}']")]
        return "none" if not own else "adapters" if all("lora_" in path for path in own) else "all"

    assert (kind("visual"), kind("language_model")) == (tower, text)
    moments = jax.tree.leaves(run.state_like.optimizer)
    assert sum(leaf.size for leaf in moments) < 2 * run.trained_count + 10
    assert (run.parameters.fingerprint is None) == (not run.parameters.frozen_like)
    if "--vision=train" in flags:
        assert {leaf.dtype for leaf in jax.tree.leaves(run.parameters.trainable_like)} == {np.dtype("float32")}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.parameters.frozen_like)} == {"bfloat16"}
    assert run.parameter_count > run.trained_count or tower == text == "all"


def test_flags_that_cannot_be_meant_are_refused():
    with pytest.raises(UsageError, match=r"vision=lora trains adapters .* --lora_rank too"):
        TrainConfig(task="squares", vision="lora")
    notes = assemble(
        parse_command_line(["main", *FLAGS, "--task=arith", "--backbone=tiny", "--vision=freeze"], tables=TABLES)
    ).notes
    assert any("--vision has no effect: backbone=tiny reads text alone" in note for note in notes)


@pytest.mark.slow
def test_a_run_learns_and_goes_on_exactly(tmp_path):
    flags = [*FLAGS, "--learning_rate=0.01", "--dropout=0.1", "--schedule=constant", "--warmup_steps=0"]
    for name, parts in (("straight", (6,)), ("stopped", (3, 6))):
        for steps in parts:
            captured(train_here, tmp_path / name, tmp_path, *flags, f"--steps={steps}")
    rows = rows_of(tmp_path / "straight")
    assert rows[-1]["loss"] < rows[0]["loss"] and rows_of(tmp_path / "straight", "eval.jsonl")[-1]["n"] == 8
    assert numbers_of(tmp_path / "straight") == numbers_of(tmp_path / "stopped")
    assert same_state(*(state_of(tmp_path / name, tmp_path, *flags) for name in ("straight", "stopped")))


@pytest.mark.slow
def test_an_exported_tiny_vlm_is_a_backbone_again(tmp_path):
    captured(train_here, tmp_path / "run", tmp_path, *FLAGS)
    _, agreement = export(tmp_path / "run", tmp_path / "out", verify=True)
    assert agreement.holds and agreement.positions > 20
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    tokenizer = make_backbone(TrainConfig(task="squares", backbone=str(tmp_path / "out"), max_length=24)).tokenizer
    assert fields["vision_start_token_id"] == tokenizer.special_ids["<|vision_start|>"]
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["max_pixels"] == 32 * 32
    # The answers of the folder are those of the run.
    rows = []
    for index, subject in enumerate(({"workdir": str(tmp_path / "run")}, {"backbone": str(tmp_path / "out")})):
        flags = EvaluateFlags(task="squares", out=str(tmp_path / f"scores-{index}"), distribution=True, **subject)
        rows.append(evaluate(flags))
    assert rows[0][1]["metrics"] == rows[1][1]["metrics"]
    assert rows[0][1]["metrics"]["n"] == COUNTS["test"]
    np.testing.assert_allclose(
        [value for value in rows[0][1]["distribution"].values() if isinstance(value, float)],
        [value for value in rows[1][1]["distribution"].values() if isinstance(value, float)],
        rtol=1e-4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", PREPROCESSORS)
def test_folders_of_every_family_train_evaluate_and_export(tmp_path, family):
    folder = make_folder(family, tmp_path / family)
    flags = [*FLAGS, f"--backbone={folder}", "--steps=2", "--max_length=64", "--batch_size=2", "--image_size=none"]
    captured(train_here, tmp_path / "all", tmp_path, *flags)
    before, after = contents(folder), rows_of(tmp_path / "all", "eval.jsonl")
    assert [row["step"] for row in after] == [0, 2]
    _, agreement = export(tmp_path / "all", tmp_path / "out", verify=True)
    assert agreement.holds
    kept = contents(tmp_path / "out")
    assert all(kept[path] == before[path] for path in before if path.suffix == ".json")
    assert type(load_pretrained(tmp_path / "out")) is type(load_pretrained(folder))
    adapters = [*flags, "--lora_rank=2", "--vision=lora", "--remat=full"]
    captured(train_here, tmp_path / "lora", tmp_path, *adapters)
    for name, adapter in (("merged", False), ("alone", True)):
        _, agreement = export(tmp_path / "lora", tmp_path / name, verify=True, adapter=adapter)
        assert agreement.holds, name
    frozen = [*flags, "--vision=freeze"]
    captured(train_here, tmp_path / "frozen", tmp_path, *frozen)
    export(tmp_path / "frozen", tmp_path / "still")
    ours, theirs = (load_pretrained(path) for path in (tmp_path / "still", folder))
    same = jax.tree.map(np.array_equal, *(dataclasses.asdict(model.config) for model in (ours, theirs)))
    assert all(jax.tree.leaves(same))
    towers = [jax.tree.leaves(jax.tree.map(np.asarray, _tower(model))) for model in (ours, theirs)]
    assert all(np.array_equal(*pair) for pair in zip(*towers, strict=True))


def _tower(model):
    return nnx.to_pure_dict(nnx.state(model.tower))


def test_a_chat_template_writes_the_image(tmp_path):
    folder = make_folder("qwen2_5_vl", tmp_path / "folder")
    template = (
        "<|user|>{% for part in messages[0].content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    backbone = make_backbone(TrainConfig(task="squares", backbone=str(folder), max_length=24))
    tokenizer = type(backbone.tokenizer).from_file(folder, chat=True)
    example = Example(key="k", prompt="How?", answer="1", image=Squares(3)[1].image)
    ids, _ = encode(example, tokenizer, backbone.images)
    pad = backbone.config.image_token_id
    run = backbone.images.run(24, 24)
    inside = ids.tolist()[ids.tolist().index(pad) - 1 :][: len(run)]
    assert inside == tokenizer.ids_of(run) and ids.tolist().count(pad) == run.count("<|image_pad|>")
    assert tokenizer.decode(ids[:8]).startswith("<|user|>")


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("family", PREPROCESSORS)
def test_real_charts_pass_through_every_processor(tmp_path, family):
    folder = Path(os.environ.get("SMMD_DATA_DIR", "")) / "chartqa_sample"
    if not folder.is_dir():
        pytest.skip("no SMMD_DATA_DIR with chartqa_sample")
    source = TASKS["chartqa"].make_source(
        "test", data_dir=str(folder), variant="published", prepare_in=str(tmp_path / "cache")
    )
    backbone = make_backbone(
        TrainConfig(task="chartqa", backbone=str(make_folder(family, tmp_path / family)), max_length=64)
    )
    longest = backbone.config.max_positions - 2
    prompts = make_prompt_batches(
        source, backbone.tokenizer, batch_size=8, max_length=longest, images=backbone.images
    )
    model = load_pretrained(backbone.folder)
    answers = answer_prompts(model, backbone.tokenizer, prompts, max_new_tokens=2)
    assert len(answers) == len(source) > 0
