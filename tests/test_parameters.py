"""What is trained and what is frozen: adapters alone move, precision is where the flags say, folders are read once."""

import dataclasses
import shutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train.parameters
from smmd_jax import make_numeric_kernel
from smmd_jax.backbones import LORA_TARGETS, PRESETS, REMAT, Decoder, save_pretrained, stack_layers
from tests.programs import equations, live
from tests.runs import captured, numbers_of, same_state, shrink, state_of, train_here
from train.assembly import assemble
from train.config import TrainConfig, parse_command_line
from train.exits import CheckpointMismatchError, UsageError
from train.log import read_jsonl
from train.main import TABLES
from train.tokenizer import make_task_tokenizer

TINY = ("--task=arith", "--steps=12", "--batch_size=2", "--max_length=64", "--eval_examples=4")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch.setitem)
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=2))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def assembled(data_dir, *flags):
    return assemble(parse_command_line(["main", *TINY, f"--data_dir={data_dir}", *flags], tables=TABLES))


def advance(run, state, steps):
    losses = []
    for _ in range(steps):
        state, metrics = run.step(state, run.place(next(run.batches)), run.kernel, run.frozen)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {}),
        (("--sigma=0.5,4",), {"sigma": (0.5, 4.0)}),
        (("--kernel=laplace", "--sigma=3"), {"kernel": "laplace", "sigma": 3.0}),
        (("--kernel=shuffled", "--seed=7"), {"kernel": "shuffled", "seed": 7}),
        (("--alpha=0.3",), {"alpha": 0.3}),
        (("--rescale=9",), {"rescale": 9.0}),
        (("--loss=mmd",), {"terms": "mmd"}),
        (("--loss=smoothness",), {"terms": "smoothness"}),
    ],
)
def test_the_flags_of_the_kernel_reach_the_step(data_dir, flags, options):
    run = assembled(data_dir, *flags)
    wanted = make_numeric_kernel(run.kernel.vocab, **options)
    jax.tree.map(np.testing.assert_array_equal, run.kernel, wanted)


@pytest.mark.parametrize(("flags", "count"), [((), "numeric_count"), (("--normalize_by=tokens",), "ce_count")])
def test_weight_and_denominator_of_the_flags_reach_the_total(data_dir, flags, count):
    run = assembled(data_dir, "--loss_weight=2.5", *flags)
    batch = run.place(next(run.batches))
    counts = run.objective.counts(batch, run.kernel)
    coefficients = run.objective.coefficients(counts)
    denominator = {"numeric_count": counts.numeric, "ce_count": counts.supervised}[count]
    assert counts.numeric != counts.supervised
    np.testing.assert_allclose(coefficients.numeric, 2.5 / denominator, rtol=1e-6)
    np.testing.assert_allclose(coefficients.ce, 1 / counts.supervised, rtol=1e-6)


def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def copied(tree):
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def logits_of(graphdef, parameters):
    return jax.jit(lambda parameters, ids: nnx.merge(graphdef, parameters)(ids))(parameters, jnp.arange(10)[None])


def test_adapters_alone_are_trained_beside_frozen_parameters(data_dir):
    run = assembled(data_dir, "--lora_rank=2", "--optimizer=adamw")
    state, frozen = run.make_state(), copied(run.frozen)
    model = run.model(state.parameters)
    plain = nnx.graphdef(nnx.eval_shape(lambda: Decoder(model.config, rngs=nnx.Rngs(0))))
    at_first = logits_of(run.parameters.graphdef, nnx.to_pure_dict(nnx.state(model)))
    np.testing.assert_array_equal(at_first, logits_of(plain, run.frozen))

    before = copied(state.parameters)
    state, _ = advance(run, state, 3)
    jax.tree.map(np.testing.assert_array_equal, run.frozen, frozen)
    jax.tree.map(lambda new, old: np.testing.assert_equal((new != old).any(), True), copied(state.parameters), before)

    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.frozen)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.parameters)} == {"float32"}
    assert {path.split("'")[-2] for path in by_path(state.parameters)} == {"lora_a", "lora_b"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * run.trained_count
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (run.frozen, state.parameters)]
    assert run.parameter_count == sum(sizes) and run.trained_count == sizes[1]


def test_a_rank_beyond_a_matrix_is_said_and_one_beyond_all_of_them_is_refused(data_dir, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_kv_heads=1))
    assert not assembled(data_dir, "--lora_rank=16").notes
    notes = assembled(data_dir, "--lora_rank=17").notes
    assert notes == (
        "lora_rank=17 is more than the smaller side of k_proj (16), v_proj (16); a rank beyond it adds nothing.",
    )
    with pytest.raises(UsageError, match=r"lora_rank=33 is more .* every matrix .*, k_proj \(16\),.* o_proj \(32\)"):
        assembled(data_dir, "--lora_rank=33", "--scan_layers=true")
    with pytest.raises(UsageError, match=r"lora_rank=17 .* every matrix with adapters, v_proj \(16\)"):
        assembled(data_dir, "--lora_rank=17", "--lora_targets=v_proj")


def test_adapters_do_not_depend_on_the_cut_into_micro_batches(data_dir):
    flags = ("--lora_rank=2", "--optimizer=sgd", "--learning_rate=0.1", "--warmup_steps=0", "--clip_norm=0")
    states = []
    for accum in (1, 2):
        run = assembled(data_dir, *flags, f"--grad_accum={accum}")
        states.append(copied(advance(run, run.make_state(), 2)[0].parameters))
    near = lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, *states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "param_dtype, grad_accum, optimizer",
    [("float32", 1, "muon"), ("bfloat16", 2, "muon"), ("bfloat16", 1, "adafactor")],
)
def test_bfloat16_products_train_with_float32_moments(data_dir, param_dtype, grad_accum, optimizer):
    run = assembled(data_dir, "--dtype=bfloat16", f"--param_dtype={param_dtype}", f"--grad_accum={grad_accum}",
                    f"--optimizer={optimizer}", "--learning_rate=0.01", "--warmup_steps=1")  # fmt: skip
    state = run.make_state()
    hidden = jax.eval_shape(lambda ids: run.model(state.parameters).hidden(ids), jnp.ones((1, 4), jnp.int32))
    assert hidden.dtype == jnp.bfloat16
    state, losses = advance(run, state, 12)
    assert losses[-1] < 0.8 * losses[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.parameters)} == {param_dtype}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim} == {"float32"}


@pytest.mark.slow
def test_adapters_in_scanned_and_rematerialised_layers_run_end_to_end_and_resume_bitwise(
    tmp_path, data_dir, monkeypatch
):
    flags = ("--lora_rank=2", "--lora_alpha=3", "--lora_targets=q_proj,down_proj", "--scan_layers", "--remat=full",
             "--dtype=bfloat16", "--grad_accum=2", "--optimizer=adamw", "--schedule=constant", "--warmup_steps=0",
             "--dropout=0.1")  # fmt: skip
    text, _ = captured(train_here, tmp_path / "whole", data_dir, *flags)
    assert "of them trained" in text
    captured(train_here, tmp_path / "parts", data_dir, *flags, "--steps=5")
    with monkeypatch.context() as patched:
        patched.setattr(train.parameters, "_fingerprint", lambda config, backbone: "other")
        with pytest.raises(CheckpointMismatchError, match="other frozen parameters than backbone=tiny"):
            captured(train_here, tmp_path / "parts", data_dir, *flags)
    captured(train_here, tmp_path / "parts", data_dir, *flags)
    states = [state_of(tmp_path / name, data_dir, *flags) for name in ("whole", "parts")]
    assert same_state(*states)
    losses = [[row["loss"] for row in numbers_of(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    # Stacked over two layers: two matrices with two halves each, and two moments of each half.
    arrays = {path: leaf.shape for path, leaf in states[0][1].items() if leaf.ndim}
    assert len(arrays) == 3 * 4 and all("lora_" in path and shape[0] == 2 for path, shape in arrays.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a tiny decoder whose tokenizer is the task's, and its parameters."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_task_tokenizer()
    model = Decoder(
        dataclasses.replace(
            PRESETS["tiny"], vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2,
            num_heads=2, num_kv_heads=2, head_dim=16,
        ),
        rngs=nnx.Rngs(7),
    )
    save_pretrained(model, path)
    tokenizer.save(path)
    return path, nnx.to_pure_dict(nnx.state(model))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_fresh_run_on_a_folder_starts_from_its_parameters(folder, data_dir, scan_layers):
    path, parameters = folder
    wanted = stack_layers(parameters) if scan_layers else parameters
    flags = (f"--backbone={path}", f"--scan_layers={str(scan_layers).lower()}", "--mesh=fsdp:2")
    run = assembled(data_dir, *flags)
    state = run.make_state()
    jax.tree.map(np.testing.assert_array_equal, state.parameters, wanted)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, run.state_like)
    run = assembled(data_dir, *flags, "--lora_rank=2")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wanted)
    jax.tree.map(np.testing.assert_array_equal, run.frozen, rounded)
    assert {path.split("'")[-2] for path in by_path(run.make_state().parameters)} == {"lora_a", "lora_b"}


def test_pretrained_weights_are_evaluated_before_the_first_step(folder, data_dir, tmp_path):
    flags = (f"--backbone={folder[0]}", "--steps=2", "--batch_size=2", "--max_length=64", "--eval_examples=4")
    train_here(tmp_path / "run", data_dir, *flags)
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "eval.jsonl")] == [0, 2]
    train_here(tmp_path / "random", data_dir, *flags[1:])
    assert [row["step"] for row in read_jsonl(tmp_path / "random" / "eval.jsonl")] == [2]


def test_other_weights_of_the_same_size_are_other_frozen_parameters(folder, data_dir, tmp_path):
    copy = shutil.copytree(folder[0], tmp_path / "model")
    fingerprint = lambda: assembled(data_dir, "--lora_rank=2", f"--backbone={copy}").parameters.fingerprint
    before = fingerprint()
    path = next(iter(sorted(copy.glob("*.safetensors"))))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint() != before
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint() == before


def test_samples_of_a_large_file_reach_from_its_first_byte_to_its_last(tmp_path):
    path, size = tmp_path / "model.safetensors", 5 * 2**20
    samples = []
    for place in (None, 0, size - 1):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        samples.append(train.parameters._sample(path))
    assert len(set(samples)) == 3


def test_the_fingerprint_follows_the_folder_the_seed_and_the_stored_dtype(folder, data_dir, tmp_path):
    path, _ = folder
    fingerprints = [
        assembled(data_dir, *flags).parameters.fingerprint
        for flags in (
            ["--lora_rank=2"], ["--lora_rank=2", "--seed=1"], ["--lora_rank=2", "--param_dtype=float32"],
            ["--lora_rank=2", f"--backbone={path}"],
        )
    ]  # fmt: skip
    assert len(set(fingerprints)) == 4
    assert assembled(data_dir, "--lora_rank=3").parameters.fingerprint == fingerprints[0]
    assert assembled(data_dir).parameters.fingerprint is None


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_no_gradient_of_a_frozen_matrix_is_computed(data_dir, lora_rank):
    run = assembled(data_dir, f"--lora_rank={lora_rank}", "--dtype=bfloat16", "--optimizer=sgd")
    operands = (run.state_like, next(run.batches), run.kernel, run.parameters.frozen_like)
    program = live(jax.make_jaxpr(run.step.__wrapped__)(*operands).jaxpr)
    made = {
        equation.outvars[0].aval.shape for equation in equations(program) if equation.primitive.name == "dot_general"
    }
    matrices = {(32, 32), (32, 64), (64, 32), (32, run.tokenizer.vocab_size)}
    assert made & matrices == (set() if lora_rank else matrices)


def test_frozen_parameters_are_sharded_and_never_donated(data_dir):
    run = assembled(data_dir, "--lora_rank=2", "--mesh=fsdp:2")
    kernel = run.frozen["layers"][0]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 2 == kernel.size
    text = run.lower_step().as_text()
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == len(jax.tree.leaves(run.state_like))


def test_flags_of_adapters_that_cannot_be_or_do_nothing_are_named(data_dir):
    with pytest.raises(UsageError, match="named 'qproj'; known: q_proj"):
        assembled(data_dir, "--lora_rank=2", "--lora_targets=qproj")
    assert any("lora_alpha has no effect" in note for note in assembled(data_dir, "--lora_alpha=3").notes)


def test_flags_offer_what_the_model_knows():
    kinds = typing.get_type_hints(TrainConfig)
    assert typing.get_args(kinds["remat"]) == tuple(REMAT)
    assert TrainConfig(task="arith").lora_targets.split(",") == list(LORA_TARGETS)
