"""A run's checkpoint as a Hugging Face folder: what it holds, that it computes the same, that transformers agrees."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import train.hf_folder
from smmd_jax.backbones import PRESETS, Decoder, load_pretrained, save_pretrained
from smmd_jax.backbones.safetensors_files import open_folder, write_file, write_index
from smmd_jax.backbones.weights import save_parameters
from tests.runs import captured, contents, shrink, steps_of, train_here
from train.assembly import assemble
from train.checkpoint import Checkpoints
from train.config import TrainConfig, check_run_folder, config_from_json
from train.exits import ExportError, StoppedError, StorageError, UsageError, exit_code_of
from train.export import main
from train.hf_folder import export
from train.tokenizer import Tokenizer, make_task_tokenizer

TOKENIZER = make_task_tokenizer()
LORA = ("--lora_rank=2", "--lora_targets=q_proj,v_proj,down_proj")
FEW = ("--steps=3", "--eval_examples=4", "--checkpoint_every=2")
# What the folders of these tests differ in: the family with biases, in bfloat16 and two shards, its layers scanned.
KINDS = {
    "tiny": ((), None),
    "scanned": (("--scan_layers=true",), None),
    "full": ((), "bfloat16"),
    "lora": (LORA, "float32"),
    "lora bfloat16 scanned": ((*LORA, "--scan_layers=true", "--lora_alpha=3"), "bfloat16"),
}


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setitem)
        patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=2))
        yield


def write_source(folder: Path, dtype: str) -> Path:
    """A qwen2 folder of random weights, biases too, in two shards, with files of its own beside them."""
    config = dataclasses.replace(
        PRESETS["tiny"], model_type="qwen2", vocab_size=TOKENIZER.vocab_size + 5, qkv_bias=True, num_layers=2,
        num_kv_heads=1,
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(3), param_dtype=jnp.dtype(dtype))
    plain = folder.with_name("plain")
    save_pretrained(model, plain)
    tensors = load_file(plain / "model.safetensors")
    rng = np.random.default_rng(0)
    tensors |= {n: rng.normal(size=t.shape).astype(t.dtype) for n, t in tensors.items() if n.endswith("bias")}
    TOKENIZER.save(folder)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(files.values())):
        write_file(folder / file, {name: tensors[name] for name in names if files[name] == file})
    write_index(folder, files, sum(tensor.nbytes for tensor in tensors.values()))
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """kind -> its run folder, trained once."""
    root = tmp_path_factory.mktemp("runs")
    made = {}

    def run(kind: str) -> Path:
        if kind not in made:
            flags, dtype = KINDS[kind]
            folder = root / kind.replace(" ", "-")
            folder.mkdir()
            backbone = [] if dtype is None else [f"--backbone={write_source(folder / 'source', dtype)}"]
            captured(train_here, folder / "run", root / "data", *FEW, *backbone, *flags)
            made[kind] = folder / "run"
        return made[kind]

    return run


def model_of(workdir):
    """The model as training holds it, with float32 products, and its vocabulary."""
    config = config_from_json((workdir / "config.json").read_text())
    run = assemble(config)
    with Checkpoints(workdir / "checkpoints", writer=False) as checkpoints:
        state = checkpoints.restore(run.state_like).state
    return run, run.model(state.parameters)


IDS = jnp.array([TOKENIZER.encode("What is 12 + 34?\n")])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "lora" else [pytest.mark.slow]) for kind in KINDS]
)
def test_the_folder_computes_what_the_run_does(runs, tmp_path, kind):
    workdir = runs(kind)
    trained, agreement = export(workdir, tmp_path / "out", verify=True)
    assert trained.step == 3 == max(steps_of(workdir))
    assert agreement.holds and agreement.positions > 20
    narrow = KINDS[kind][1] == "bfloat16"
    # Rounded weights are seen, and equal ones give equal logits but for the order of sums.
    assert (1e-4 if narrow else 0.0) <= agreement.largest_difference < (0.1 if narrow else 2e-5)
    assert agreement.argmax_agreement > 0.95 and agreement.mean_kl < (1e-3 if narrow else 1e-9)
    run, model = model_of(workdir)
    ours, theirs = (np.asarray(m(IDS), np.float32) for m in (model, load_pretrained(tmp_path / "out")))
    np.testing.assert_allclose(theirs, ours, atol=0.1 if narrow or "lora" in kind else 2e-5)
    assert np.abs(theirs - np.asarray(_start(run)(IDS), np.float32)).max() > 1e-3, "as if nothing had been trained"


def _start(run):
    return run.model(run.make_state().parameters)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_keeps_the_sources_names_types_shards_and_files(runs, tmp_path, kind):
    source = runs(kind).parent / "source"
    export(runs(kind), tmp_path / "out")
    assert open_folder(tmp_path / "out").tensors == open_folder(source).tensors
    before, after = contents(source), contents(tmp_path / "out")
    weights = {name for name in before if name.suffix == ".safetensors"}
    assert before.keys() == after.keys() and len(weights) == 2
    others = before.keys() - weights - {Path("model.safetensors.index.json")}
    assert {name: before[name] for name in others} == {name: after[name] for name in others}
    index = [json.loads(files[Path("model.safetensors.index.json")]) for files in (before, after)]
    assert index[0]["metadata"]["total_size"] == index[1]["metadata"]["total_size"]
    assert index[0]["weight_map"] == index[1]["weight_map"]


def test_only_the_adapted_matrices_differ_from_the_source(runs, tmp_path):
    source = runs("lora").parent / "source"
    export(runs("lora"), tmp_path / "out")
    left, right = open_folder(source), open_folder(tmp_path / "out")
    whole = lambda files, name: files.read(name, (slice(None),) * len(files.shapes[name]))
    rounded = lambda array: np.asarray(jnp.asarray(array, jnp.bfloat16), np.float32)  # as frozen parameters are held
    changed = {n for n in left.tensors if (rounded(whole(left, n)) != whole(right, n)).any()}
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    assert changed == {f"model.layers.{layer}.{target}.weight" for layer in range(2) for target in targets}


def test_the_tiny_backbone_brings_its_tokenizer(runs, tmp_path):
    export(runs("tiny"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(tmp_path / "out")
    assert tokenizer.fingerprint == TOKENIZER.fingerprint and tokenizer.eos_ids == TOKENIZER.eos_ids
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("kind", ["lora", "lora bfloat16 scanned"])
def test_adapters_are_written_as_peft_names_them(runs, tmp_path, kind):
    _, agreement = export(runs(kind), tmp_path / "out", adapter=True, verify=True)
    assert agreement.largest_difference == 0
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    assert tensors[first + "A.weight"].shape == (2, 32) and tensors[first + "B.weight"].shape == (32, 2)
    assert len(tensors) == 2 * 3 * 2 and {tensor.dtype.name for tensor in tensors.values()} == {"float32"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    alpha = 3.0 if "scanned" in kind else 4.0
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, alpha)
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(runs(kind).parent / "source")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_older_step_is_exported_where_it_is_asked_for(runs, tmp_path):
    workdir = runs("tiny")
    assert export(workdir, tmp_path / "old", step=2)[0].step == 2
    export(workdir, tmp_path / "new")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("old", "new"))
    assert any((old[name] != new[name]).any() for name in old)
    with pytest.raises(UsageError, match="does not hold step 1: name another --step"):
        export(workdir, tmp_path / "none", step=1)
    assert not (tmp_path / "none").exists()


def test_the_command_says_what_it_wrote_and_takes_an_empty_folder(runs, tmp_path):
    (tmp_path / "out").mkdir()
    argv = ["export", f"--workdir={runs('tiny')}", f"--out={tmp_path / 'out'}", "--verify"]
    words, _ = captured(main, argv)
    assert f"wrote the model of step 3 of {runs('tiny')} to {tmp_path / 'out'}\nverified: max |dlogit| " in words
    assert "(tolerance 1e-03), mean KL " in words and "arg-max agreement 100.00% over " in words
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="is not an empty folder: nothing is overwritten"):
        main(argv)
    assert contents(tmp_path / "out") == before and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), r"--workdir and --out must be given"),
        (("--workdir=x",), r"--out must be given"),
        (("--workdir=nowhere", "--out=x"), r"workdir=nowhere is not the folder of a run"),
        (("--workdir=x", "--out=x", "--step=-1"), "step=-1: wanted a whole number of at least 0"),
        (("--workdir=x", "--out=x", "--adaptor"), r"--adaptor is not a flag; did you mean --adapter"),
    ],
)
def test_wrong_flags_are_refused(argv, words):
    with pytest.raises(UsageError, match=words):
        main(["export", *argv])


def test_a_run_without_adapters_or_without_a_folder_has_no_adapter_to_export(runs, tmp_path):
    with pytest.raises(UsageError, match=r"trained all parameters \(lora_rank=0\)"):
        export(runs("tiny"), tmp_path / "out", adapter=True)
    workdir = tmp_path / "run"
    captured(train_here, workdir, tmp_path / "data", *FEW, *LORA)
    with pytest.raises(UsageError, match="backbone=tiny, which is no folder: export them merged"):
        export(workdir, tmp_path / "out", adapter=True)
    assert export(workdir, tmp_path / "out", verify=True)[1].largest_difference < 2e-5
    for path in (workdir / "checkpoints").iterdir():
        path.rename(tmp_path / f"away-{path.name}")
    with pytest.raises(UsageError, match="does not hold a checkpoint: train first"):
        export(workdir, tmp_path / "other")


@pytest.mark.parametrize("out", ["a\0b", "x" * 300, "checkpoints/model", "checkpoints"])
def test_a_place_where_no_model_can_be_is_refused_before_any_work(runs, tmp_path, out, monkeypatch):
    workdir = runs("tiny")
    before = contents(workdir)
    monkeypatch.setattr(train.hf_folder, "make_backbone", lambda config: pytest.fail("began to work"))
    with pytest.raises(UsageError, match=r"cannot be a folder|among the checkpoints|not an empty folder"):
        export(workdir, workdir / out)
    assert contents(workdir) == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not the config of a run"),
        (b"[" * 100_000, "this is not a config"),
        (b'{"task": "gone"}', "trained on task=gone, which is not known here: arith"),
        (b'{"task": "arith", "steps": "5"}', "steps='5': wanted a whole number"),
    ],
)
def test_a_run_folder_of_another_kind_is_refused(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        export(tmp_path, tmp_path / "out")
    if b"task" not in content:
        with pytest.raises(UsageError, match="is not readable"):
            check_run_folder(TrainConfig(task="arith", workdir=str(tmp_path)))


def test_an_export_that_is_ended_by_a_signal_leaves_nothing(runs, tmp_path, monkeypatch):
    def struck(*args, **kwargs):
        assert list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    workdir, former = runs("tiny"), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train.hf_folder, "_verify", struck)
    with pytest.raises(StoppedError, match="nothing of it is left") as stopped:
        main(["export", f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--verify"])
    assert exit_code_of(stopped.value) == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == former


@pytest.mark.parametrize("fault", ["head", "adapters left out", "nan"])
def test_a_folder_that_computes_something_else_is_not_written(runs, tmp_path, monkeypatch, fault):
    def damaged(parameters, config, folder, **options):
        layers = dict(parameters["layers"])
        if fault == "head":
            parameters = {**parameters, "embed_tokens": {"embedding": parameters["embed_tokens"]["embedding"] * 1.05}}
        elif fault == "nan":
            parameters = {**parameters, "norm": {"weight": parameters["norm"]["weight"] * jnp.nan}}
        else:
            attention = layers[0]["self_attn"]
            parameters = {**parameters, "layers": {**layers, 0: {**layers[0], "self_attn": {
                **attention, "q_proj": {**attention["q_proj"], "kernel": attention["q_proj"]["kernel"] * 0},
            }}}}  # fmt: skip
        save_parameters(parameters, config, folder, **options)

    monkeypatch.setattr(train.hf_folder, "save_parameters", damaged)
    with pytest.raises(ExportError, match=r"was not written: the exported model differs .* max \|dlogit\|") as refused:
        export(runs("lora"), tmp_path / "out", verify=True)
    assert exit_code_of(refused.value) == 4
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(runs, tmp_path, monkeypatch):
    def full(parameters, config, folder, **options):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train.hf_folder, "save_parameters", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export(runs("tiny"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["tiny", "full", "lora"])
def test_transformers_loads_it_and_gives_the_same_logits(runs, tmp_path, kind):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export(runs(kind), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    if kind == "tiny":  # for qwen2 transformers would replace the parts of a tokenizer that is not Qwen's
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer("What is 12 + 34?\n", add_special_tokens=False).input_ids == IDS[0].tolist()
        assert tokenizer.eos_token_id == TOKENIZER.eos_id
    with torch.no_grad():
        wanted = theirs(torch.tensor(np.asarray(IDS))).logits.numpy()
    np.testing.assert_allclose(load_pretrained(tmp_path / "out")(IDS), wanted, atol=1e-4)
    assert theirs.generation_config.eos_token_id == [TOKENIZER.eos_id]


@pytest.mark.parity
def test_adapters_on_transformers_base_give_the_merged_models_logits(runs, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    export(runs("lora"), tmp_path / "merged")
    export(runs("lora"), tmp_path / "adapter", adapter=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.bfloat16)
    model = model.float().eval()  # frozen parameters were bfloat16 in training
    for name in sorted(name for name in tensors if name.endswith("lora_A.weight")):
        # PEFT's rule: W + lora_alpha / r * B A, on the module of that name.
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        module.weight.data += config["lora_alpha"] / config["r"] * torch.from_numpy(change)
    with torch.no_grad():
        wanted = model(torch.tensor(np.asarray(IDS))).logits.numpy()
    np.testing.assert_allclose(load_pretrained(tmp_path / "merged")(IDS), wanted, atol=1e-4)
