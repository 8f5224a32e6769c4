"""Models of a hub, by the real client, from a server on this machine that answers as a hub does."""

import dataclasses
import hashlib
import http.server
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from flax import nnx

from smmd_jax.backbones import PRESETS, Decoder, save_pretrained
from tests.runs import run_child
from train.backbone import make_backbone
from train.config import TrainConfig
from train.exits import UsageError, exit_code_of, explain
from train.tokenizer import make_task_tokenizer

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.slow  # each question is a process of its own: the client reads its settings once

REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyz"
# What a repository holds beside the model, none of which may be fetched.
UNWANTED = ("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "consolidated.safetensors")
# Name -> (status, the hub's code for it).
REFUSED = {"org/gated": (403, "GatedRepo"), "org/missing": (404, "RepoNotFound"), "org/broken": (500, "")}


class Hub(http.server.BaseHTTPRequestHandler):
    """Three routes of a hub: a model's information, its list of files, and the files."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        self.server.asked.append((self.command, path, self.headers.get("Authorization")))
        api, _, rest = path.partition("/") if path.startswith("api/") else ("", "", path)
        parts = rest.split("/")[1:] if api else rest.split("/")
        name, action, tail = "/".join(parts[:2]), parts[2], "/".join(parts[4:])
        if name in REFUSED:
            status, code = REFUSED[name]
            self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"} if code else {})
        elif action == "revision":
            siblings = [{"rfilename": file} for file in self.server.files]
            self.answer_json({"_id": "0", "id": name, "sha": REVISION, "siblings": siblings})
        elif action == "tree":
            files = self.server.files.items()
            self.answer_json(
                [{"type": "file", "path": file, "size": len(data), "oid": etag(data)} for file, data in files]
            )
        elif tail in self.server.files:
            data = self.server.files[tail]
            cut = name == "org/cut" and tail.endswith(".safetensors")
            self.answer(200, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": REVISION}, cut=cut)
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def answer(self, status, body, headers, *, cut=False):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, *arguments):
        pass


def etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = make_task_tokenizer()
    small = dict(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    config = dataclasses.replace(PRESETS["tiny"], vocab_size=tokenizer.vocab_size, **small)
    folder = tmp_path_factory.mktemp("models") / "model"
    save_pretrained(Decoder(config, rngs=nnx.Rngs(0)), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def server(model):
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    hub.asked = []
    hub.files = {path.name: path.read_bytes() for path in model.iterdir()} | {name: b"x" * 99 for name in UNWANTED}
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()


def ask(server, cache, *names, **variables):
    """Ask for each model in a process whose hub is the server; returns what each gave."""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "no_proxy": "127.0.0.1",
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    done = run_child(["-m", "tests.test_hub", *names], **environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_model_is_fetched_once_and_then_read_without_a_network(server, model, tmp_path):
    [found] = ask(server, tmp_path, "org/model")
    folder = Path(found["folder"])
    assert found["notes"] == [f"backbone=org/model is {REVISION} of the hub, in {folder}."]
    assert folder.is_relative_to(tmp_path)
    wanted = {path.name: path.read_bytes() for path in model.iterdir()}
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == wanted
    fetched = {path.rpartition("/")[2] for method, path, _ in server.asked if method == "GET" and "/resolve/" in path}
    assert fetched == set(wanted)

    server.asked.clear()
    [again] = ask(server, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert again == found and not server.asked
    server.shutdown()
    server.server_close()
    assert ask(server, tmp_path, "org/model") == [found]


def test_what_a_hub_refuses_gives_one_paragraph_and_leaves_the_token_out(server, tmp_path):
    words = {
        "org/gated": "is gated. Accept its licence on its page, http://127.0.0.1:",
        "org/missing": "was not found on http://127.0.0.1:",
        "org/broken": "is not complete in this machine's cache, and http://127.0.0.1:",
    }
    for token, seen in (("", "No access token was found: set HF_TOKEN"), (TOKEN, "An access token was found")):
        for name, found in zip(words, ask(server, tmp_path, *words, HF_TOKEN=token), strict=True):
            assert found["code"] == 2 and "\n" not in found["error"] and TOKEN not in found["error"]
            assert f"backbone={name}: the model {words[name]}" in found["error"] and seen in found["error"]
            assert "put a model folder" in found["error"]
    assert {sent for _, _, sent in server.asked} == {None, f"Bearer {TOKEN}"}


def test_a_download_that_breaks_off_is_never_taken_for_a_model(server, tmp_path):
    [cut] = ask(server, tmp_path, "org/cut")
    [offline] = ask(server, tmp_path, "org/cut", HF_HUB_OFFLINE="1")
    for found in (cut, offline):
        assert found["code"] == 2 and "is not complete in this machine's cache" in found["error"]
    assert not list(tmp_path.rglob("model.safetensors"))


def main(names) -> None:
    for name in names:
        try:
            found = make_backbone(TrainConfig(task="arith", backbone=name))
            print(json.dumps({"folder": os.fspath(found.folder), "notes": list(found.notes)}))
        except UsageError as error:
            print(json.dumps({"error": explain(error), "code": exit_code_of(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
