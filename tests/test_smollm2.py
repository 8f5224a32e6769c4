"""SmolLM2-135M-Instruct from its GGUF file, against transformers: weights, perplexity, greedy text, tokenizer."""

import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import numeric_vocab_from_tokenizer
from smmd_jax.backbones import PRESETS, load_pretrained
from tests.runs import captured, rows_of, shrink, steps_of, train_here
from train import gguf_models
from train.backbone import make_backbone
from train.config import TrainConfig
from train.exits import UsageError
from train.generate import generate
from train.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.parity, pytest.mark.realdata]

SENTENCE = "The capital of France is Paris, and the river that flows through the city is called the Seine."
BEGINNING = "Once upon a time, there was a little"
NEW = 24
TEXTS = [
    "", " ", "a", "Hello, world!", "What is -12 + (7 - 3)?\n", "3.14159 1,000,000 2024-01-02 12:45", "#### 18",
    "it's we'll I'M DON'T", "def f(x):\n    return x  # two\n\n\n", "Ünïcödé 日本語 한국어 \U0001f600 e\u0301",
    "a\tb\r\nc \u00a0 d", "<|im_start|>user<|endoftext|>", "aaaaaaaaaaaaaaaaaaaaaaaaaa", "½", " a", "a ",
]  # fmt: skip


def real_file() -> Path:
    folder = os.environ.get("SMMD_TOKENIZER_DIR")
    found = sorted(Path(folder).glob("smollm2/*.gguf")) if folder else []
    if not found:
        pytest.skip("SMMD_TOKENIZER_DIR holds no smollm2/*.gguf: .ci/fetch_tokenizers fetches it")
    return found[0]


@pytest.fixture(scope="module")
def packages():
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    return torch, pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The model where --backbone=smollm2-135m looks: in the wheel, or the file that was taken from it."""
    pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            gguf_models.smollm2_file()
        except UsageError:
            file = _Located(real_file())
            patch.setattr(gguf_models.metadata, "files", lambda name: [file])
        yield


@pytest.fixture(scope="module")
def backbone(installed):
    return make_backbone(TrainConfig(task="arith", backbone="smollm2-135m"))


class _Located(type(Path())):
    def locate(self):
        return self


@pytest.fixture(scope="module")
def model(backbone):
    return load_pretrained(backbone.folder)


@pytest.fixture(scope="module")
def reference(backbone, packages):
    torch, transformers = packages
    return transformers.AutoModelForCausalLM.from_pretrained(backbone.folder, dtype=torch.float32).eval()


def perplexity(logits, ids) -> float:
    logits, targets = np.asarray(logits, np.float64)[:-1], np.array(ids[1:])
    highest = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[:, 0]
    return float(np.exp((log_sum - logits[np.arange(len(targets)), targets]).mean()))


def test_the_config_is_that_of_the_preset(backbone):
    assert backbone.config == PRESETS["smollm2-135m"]
    assert backbone.eos_ids == (2,) and backbone.tokenizer.pad_id == 2
    vocab = numeric_vocab_from_tokenizer(backbone.tokenizer.backend, vocab_size=backbone.config.vocab_size)
    assert vocab.token_ids.tolist() == list(range(32, 42))
    assert "no token for 21 of the 256 bytes" in backbone.notes[0]


def test_every_weight_is_what_transformers_reads_from_the_file_itself(reference):
    """Equal to the bit, in the order of rows too: a wrong order of the query and key rows still writes English."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    loaded = load_gguf_checkpoint(str(real_file()), return_tensors=True, model_to_load=reference)["tensors"]
    ours = reference.state_dict()
    assert set(ours) - set(loaded) == {"lm_head.weight"} and set(loaded) <= set(ours)
    assert all((ours[name] == tensor).all() for name, tensor in loaded.items())


def test_perplexity_of_a_plain_sentence_is_that_of_transformers(backbone, model, reference, packages):
    ids = backbone.tokenizer.encode(SENTENCE)
    with packages[0].no_grad():
        wanted = perplexity(reference(packages[0].tensor([ids])).logits[0].numpy(), ids)
    assert wanted == pytest.approx(7.6601, rel=1e-3)  # 13.06 with a wrong order of the rows
    assert perplexity(model(jnp.array([ids]))[0], ids) == pytest.approx(wanted, rel=1e-3)


def test_greedy_text_is_that_of_transformers_token_for_token(backbone, model, reference, packages):
    prompt = backbone.tokenizer.encode(BEGINNING)
    rows = np.array([prompt])
    ours = generate(model, rows, attention_mask=np.ones_like(rows), max_new_tokens=NEW, eos_ids=backbone.eos_ids)
    wanted = reference.generate(packages[0].tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
    assert np.asarray(ours)[0].tolist() == wanted.tolist()
    assert "girl named Emma who loved to play" in backbone.tokenizer.decode(wanted.tolist())


def test_the_tokenizer_is_that_of_transformers_but_for_what_stands_before_a_digit(backbone, packages):
    path = real_file()
    theirs = packages[1].AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = lambda text: theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert {text: backbone.tokenizer.encode(text) for text in TEXTS} == {text: plain(text) for text in TEXTS}
    # transformers leaves out that digits are cut off before anything else, as the `pre` field of the file says.
    ours = [backbone.tokenizer.decode([token]) for token in backbone.tokenizer.encode("x  1")]
    assert ours == ["x", "  ", "1"] and [theirs.decode([token]) for token in plain("x  1")] == ["x", " ", " ", "1"]
    messages = [{"role": "user", "content": "What is 2 + 12?"}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked = Tokenizer.from_file(backbone.folder, chat=True).encode_prompt("What is 2 + 12?")
    assert asked == theirs.encode(chat, add_special_tokens=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora_rank=4", "--lora_targets=q_proj,v_proj"), r"smollm2-135m: [\d,]+ parameters, [\d,]+ of them trained"),
        (("--optimizer=adafactor",), r"smollm2-135m: 134,515,008 parameters\n"),
    ],
    ids=["adapters", "all parameters"],
)
def test_two_steps_of_fine_tuning_are_taken_saved_and_evaluated(installed, flags, words, tmp_path, monkeypatch):
    shrink(monkeypatch.setitem)  # of the arithmetic data only a few
    few = ("--steps=2", "--batch_size=1", "--eval_examples=2", "--eval_batch_size=2", "--checkpoint_every=0")
    out, _ = captured(
        train_here, tmp_path / "run", tmp_path, "--backbone=smollm2-135m", "--scan_layers=true", *few, *flags
    )
    assert re.search(words, out), out
    first, second = rows_of(tmp_path / "run")
    # A model that had not been read would begin at log 49,152 = 10.8.
    assert 0 < first["ce"] < 8 and first["loss"] == pytest.approx(first["ce"] + 3 * first["numeric"], rel=1e-5)
    assert second["loss"] != first["loss"] and np.isfinite([second["loss"], second["grad_norm"]]).all()
    assert [(row["step"], row["n"]) for row in rows_of(tmp_path / "run", "eval.jsonl")] == [(0, 2), (2, 2)]
    assert steps_of(tmp_path / "run") == [2]
