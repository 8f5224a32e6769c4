"""What --backbone takes, and the sentence for everything it cannot take."""

import dataclasses
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from smmd_jax.backbones import PRESETS, Decoder, load_pretrained, save_pretrained
from smmd_jax.errors import CheckpointError, TokenizerError
from train import backbone as module
from train import hub
from train.backbone import make_backbone
from train.config import TrainConfig
from train.exits import UsageError, exit_code_of, explain
from train.main import TABLES
from train.tasks import TASKS
from train.tokenizer import make_task_tokenizer

TOKENIZER = make_task_tokenizer()
CONFIG = dataclasses.replace(
    PRESETS["tiny"], vocab_size=TOKENIZER.vocab_size + 7, hidden_size=16, intermediate_size=32, num_layers=2,
    num_heads=2, num_kv_heads=1, head_dim=8,
)  # fmt: skip


def make_config(name, **changes) -> TrainConfig:
    return TrainConfig(task="arith", backbone=str(name), **changes)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "some" / "model"
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(0)), folder)
    TOKENIZER.save(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tiny_starts_at_random_with_the_digit_level_tokenizer():
    found = make_backbone(make_config("tiny", dropout=0.25))
    assert (found.folder, found.notes, found.config.dropout) == (None, (), 0.25)
    assert found.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert found.config.vocab_size == TOKENIZER.vocab_size and found.eos_ids == (TOKENIZER.eos_id,)
    positions = [make_backbone(make_config("tiny", max_length=length)).config.max_positions for length in (64, 2048)]
    assert positions == [1024, 2048]


def test_a_folder_gives_its_config_with_the_runs_dropout(folder):
    edit(folder / "generation_config.json", eos_token_id=[3, TOKENIZER.eos_id])
    found = make_backbone(make_config(folder, dropout=0.5))
    assert found.config == dataclasses.replace(CONFIG, dropout=0.5)
    assert (found.folder, found.name, found.notes) == (folder, str(folder), ())
    assert found.eos_ids == found.tokenizer.eos_ids == (TOKENIZER.eos_id, 3)
    model = load_pretrained(found.folder)
    tokens = jnp.array([found.tokenizer.encode("What is 1 + 2?\n")])
    assert jnp.array_equal(model(tokens), Decoder(CONFIG, rngs=nnx.Rngs(0))(tokens))


def test_a_relative_folder_beats_a_hub_name_and_says_so(original, monkeypatch):
    monkeypatch.chdir(original.parents[1])
    monkeypatch.setattr(module, "download", lambda name: pytest.fail("asked the hub"))
    found = make_backbone(make_config("some/model"))
    assert found.notes == ("backbone=some/model is the local folder, not a model of a hub.",)


def test_code_that_a_config_names_is_reported_and_never_run(folder):
    edit(folder / "config.json", auto_map={"AutoModel": "modeling_x.Model"}, model_file="modeling_x.py")
    (folder / "modeling_x.py").write_text(f"open({str(folder / 'canary')!r}, 'w')")
    found = make_backbone(make_config(folder))
    assert "names code to run (auto_map, model_file); no code of a model is ever run" in found.notes[0]
    assert not (folder / "canary").exists()


def test_bytes_without_a_token_are_noted(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    del data["model"]["vocab"]["ÿ"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert "has no token for 1 of the 256 bytes (0xff, ...)" in make_backbone(make_config(folder)).notes[0]


def test_a_folder_that_is_no_checkpoint_lists_what_was_looked_for(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(1))
    with pytest.raises(UsageError) as refused:
        make_backbone(make_config(tmp_path))
    assert (
        "Looked for and not found: config.json; model.safetensors or model.safetensors.index.json; tokenizer.json or "
        "tekken.json. Pickles (pytorch_model.bin) are never read"
    ) in str(refused.value)
    assert exit_code_of(refused.value) == 2


@pytest.mark.parametrize("name", ["./nowhere", "/no/where/at all", "nowhere.gguf", "~/no-such-model"])
def test_a_path_that_is_not_there_is_refused(name):
    with pytest.raises(UsageError, match=r"there is no such file or folder, and a model of a hub is called org/name"):
        make_backbone(make_config(name))


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000 + "/y", "./" + "x" * 300])
def test_a_path_that_no_file_can_have_is_refused_like_one_that_is_not_there(name):
    with pytest.raises(UsageError, match="is no name of a file or folder") as refused:
        make_backbone(make_config(name))
    assert len(str(refused.value)) < 700


def test_signs_that_steer_a_terminal_are_shown_as_such():
    text = explain(CheckpointError("1 extra: x\x1b[31m\u202e\x00\n  2 missing: \N{CJK UNIFIED IDEOGRAPH-6570}"))
    assert text == "error: 1 extra: x\\x1b[31m\\u202e\\x00\n  2 missing: \N{CJK UNIFIED IDEOGRAPH-6570}"


def test_a_narrow_head_is_refused_before_any_work(folder):
    narrow = dataclasses.replace(CONFIG, vocab_size=TOKENIZER.vocab_size - 9)
    shutil.rmtree(folder)
    save_pretrained(Decoder(narrow, rngs=nnx.Rngs(0)), folder)
    TOKENIZER.save(folder)
    with pytest.raises(TokenizerError, match=rf"head has {narrow.vocab_size} columns .* 9 of its tokens") as refused:
        make_backbone(make_config(folder))
    assert exit_code_of(refused.value) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.mlp.down_proj.weight"),
        ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox', wanted one of"),
        ({"quantization_config": {"quant_method": "fp8"}}, "take the BF16 repository"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_with_its_name(folder, changes, words):
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words) as refused:
        make_backbone(make_config(folder))
    assert f"error: backbone={folder}: " in explain(refused.value)
    assert exit_code_of(refused.value) == 4


def test_rows_longer_than_the_model_has_positions_are_refused(folder):
    edit(folder / "config.json", max_position_embeddings=128)
    with pytest.raises(UsageError, match=r"max_length=129 is more than the 128 positions of backbone="):
        make_backbone(make_config(folder, max_length=129))
    assert make_backbone(make_config(folder, max_length=128)).config.max_positions == 128


def test_a_task_of_chats_needs_a_template(folder, monkeypatch):
    monkeypatch.setitem(TASKS, "arith", dataclasses.replace(TASKS["arith"], chat=True))
    with pytest.raises(UsageError, match="backbone=tiny has no chat template"):
        make_backbone(make_config("tiny"))
    with pytest.raises(TokenizerError, match="the tokenizer has no chat template: choose an instruct model"):
        make_backbone(make_config(folder))
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }}")
    tokenizer = make_backbone(make_config(folder)).tokenizer
    assert tokenizer.decode(tokenizer.encode_prompt("1 + 1")) == "Q: 1 + 1"


def test_the_table_of_names_and_their_other_form():
    from train.config import make_config as from_flags

    for name in ("tiny", "smollm2-135m", "org/name", "./m", "../models/a b", "m.gguf", "~/m", ".", "/m"):
        assert from_flags({"task": "arith", "backbone": name}, tables=TABLES).backbone == name
    with pytest.raises(UsageError, match=r"backbone=gpt2: not known. Known: tiny, tiny-vlm, smollm2-135m, or a model"):
        from_flags({"task": "arith", "backbone": "gpt2"}, tables=TABLES)


class Response:
    """Enough of a reply for the hub client's errors."""

    headers: dict = {}  # noqa: RUF012
    request = None

    def __init__(self, status_code):
        self.status_code = status_code


def hub_error(name, *arguments, status=403):
    errors = pytest.importorskip("huggingface_hub").errors
    kind = getattr(errors, name)
    return kind(*arguments, response=Response(status)) if issubclass(kind, errors.HfHubHTTPError) else kind(*arguments)


SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("token", [SECRET, None])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: hub_error("GatedRepoError", "403"), r"is gated. Accept its licence on its page, \S+/org/big, with"),
        (lambda: hub_error("RepositoryNotFoundError", "404"), "was not found .* or the model is private"),
        (lambda: hub_error("HfHubHTTPError", "boom", status=503), "answered with 503"),
        (lambda: hub_error("LocalEntryNotFoundError", "offline"), "is not complete in this machine's cache, and "),
        (lambda: ConnectionError(f"no route, token={SECRET}"), "is not complete in this machine's cache, and "),
        (lambda: RuntimeError("a transport's own"), "could not be reached"),
    ],
)
def test_a_model_that_cannot_be_had_gives_one_paragraph(monkeypatch, error, words, token):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def fail(name, **options):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # another test may have set the variable
    with pytest.raises(UsageError, match=words) as refused:
        make_backbone(make_config("org/big"))
    text = explain(refused.value)
    assert "backbone=org/big" in text and "put a model folder" in text and "\n" not in text and SECRET not in text
    assert ("An access token was found" in text) == (token is not None)
    assert ("No access token was found: set HF_TOKEN" in text) == (token is None)
    assert exit_code_of(refused.value) == 2


def test_offline_without_a_copy_is_said_so_by_the_real_client(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"org/big: the model is not complete .* HF_HUB_OFFLINE is set"):
        make_backbone(make_config("org/big"))


def test_without_the_hubs_client_the_local_way_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install huggingface_hub. Without a hub: put a model folder"):
        make_backbone(make_config("org/big"))


def test_a_download_takes_safetensors_and_never_pickles_or_nested_copies(monkeypatch, original):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    files = [
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
        "tekken.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
        "generation_config.json", "pytorch_model.bin", "model.pth", "modeling.py", "consolidated.safetensors",
        "original/model.safetensors", "onnx/config.json", "training_args.bin",
    ]  # fmt: skip
    asked = {}

    def download(name, *, allow_patterns, ignore_patterns):
        from huggingface_hub.utils import filter_repo_objects

        asked["files"] = set(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(original)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = make_backbone(make_config("org/big"))
    assert asked["files"] == set(files[:10])
    assert found.folder == original and "org/big is model of the hub" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "is_name"),
    [("org/name", True), ("Qwen/Qwen2.5-0.5B", True), ("a/b/c", False), ("../x", False), ("/x", False), ("x", False)],
)
def test_names_of_a_hub(name, is_name):
    assert hub.is_hub_name(name) == is_name


def test_jax_is_not_asked_for_devices(folder, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *arguments: pytest.fail("touched a device"))
    make_backbone(make_config(folder))
