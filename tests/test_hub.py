"""`pubsel export hub=OWNER/NAME`, against a hub on loopback; and the example of use on the card of a folder."""

import base64
import http.server
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.made import done, failed, picture, write_npz

FILES = {"model.safetensors", "config.json", "README.md", "privacy.html"}
RUN = """run pair.private=./mine.npz pair.public=null model=linear algorithm=dp_sgd training.epochs=1
    training.batch_size=40 epsilon=4 privacy.delta=1e-3 threads=1""".split()
EXPORT = ("export", "*", "to=release")


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub answers to an upload. of the server: repositories, each whether it is private and its files; tokens;
    url."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server, (_, name, what) = self.server, self.parts()
        server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            new = json.loads(body)
            name = f"{new['organization']}/{new['name']}"
            if new["organization"] == "another":
                return self.answer({"error": "You don't have the rights\nto write here"}, 403)
            known = name in server.repositories
            server.repositories.setdefault(name, (new["visibility"] == "private", {".gitattributes": b""}))
            return self.answer({"url": f"{server.url}/{name}"}, 409 if known else 200)
        if what == "preupload":
            each = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": file["path"]} | each for file in json.loads(body)["files"]]})
        if what == "commit":
            files = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
            server.repositories[name][1].update({file["path"]: base64.b64decode(file["content"]) for file in files})
            server.commits += 1
            return self.answer({"commitOid": "1", "commitUrl": f"{server.url}/{name}/commit/1"})
        return self.answer({"errors": [], "warnings": []})  # of the head of a card

    def do_GET(self):
        _, name, _ = self.parts()
        if name not in self.server.repositories:
            return self.answer({"error": "not found"}, 404)
        private, files = self.server.repositories[name]
        return self.answer({"id": name, "private": private, "siblings": [{"rfilename": file} for file in files]})

    def parts(self):
        """The kind, the name of the repository, and what is done to it: /api/KIND/OWNER/NAME/WHAT."""
        kind, owner, name, what = [*self.path.partition("?")[0].split("/")[2:], "", "", ""][:4]
        return kind, f"{owner}/{name}", what

    def answer(self, values, code=200):
        body = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A running hub, and a token for it."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.repositories, server.tokens, server.commits = {}, set(), 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def trained(cli):
    """A run with noise from the operating system."""
    random = np.random.RandomState(0)
    x, y = random.randint(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    write_npz("mine.npz", (x[:40], y[:40]), (x[40:], y[40:]))
    done(cli, *RUN, "privacy.secure_noise=true")
    return cli


def test_the_folder_is_uploaded_whole_into_a_new_private_repository(trained, hub):
    out, _ = done(trained, *EXPORT, "hub=somebody/model")
    assert f"Uploaded to {hub.url}/somebody/model, which is private: its page can make it public." in out
    private, files = hub.repositories["somebody/model"]
    assert private
    assert files == {".gitattributes": b""} | {path.name: path.read_bytes() for path in Path("release").iterdir()}
    assert files.keys() - {".gitattributes"} == FILES
    assert (hub.tokens, hub.commits) == ({"Bearer secret"}, 1)

    # a repository that is there keeps its visibility, which is said
    hub.repositories["somebody/open"] = False, {"README.md": b"of before"}
    assert "somebody/open, which is public." in done(trained, *EXPORT, "hub=somebody/open")[0]
    assert hub.repositories["somebody/open"][1].keys() == FILES


def test_without_hub_nothing_is_asked(trained, hub):
    assert "Uploaded" not in done(trained, *EXPORT)[0]
    assert (hub.repositories, hub.tokens) == ({}, set())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another/model", r"the folder is made, but not uploaded \(.*403 Forbidden.*\): check name, token and network"),
        ("somebody/full", "the repository has other files, such as model.onnx: give a new name"),
    ],
)
def test_what_the_hub_rejects_is_one_line_and_the_folder_is_there(trained, hub, name, message):
    hub.repositories["somebody/full"] = True, {"README.md": b"", "model.onnx": b"of another model"}
    assert re.search(f"hub={name}: {message}\n", failed(trained, *EXPORT, f"hub={name}", code=1))
    assert {path.name for path in Path("release").iterdir()} == FILES
    assert hub.commits == 0


def test_a_hub_that_does_not_answer_is_one_line(trained, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    err = failed(trained, *EXPORT, "hub=somebody/model", code=1)
    assert "hub=somebody/model: the folder is made, but not uploaded (" in err


@pytest.mark.parametrize("name", ["model", "a/b/c", "a/", "/b", "a--b/c", "datasets/a/b"])
def test_names_that_no_repository_has_are_rejected_before_any_work(cli, hub, name):
    assert f"hub={name}: give the name of a repository, hub=OWNER/NAME" in failed(cli, *EXPORT, f"hub={name}")
    assert not Path("release").exists()


def test_without_a_token_nothing_is_made(cli, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "there is no token to write with: run hf auth login" in failed(cli, *EXPORT, "hub=somebody/model")
    assert not Path("release").exists()


def test_a_model_that_may_not_be_given_away_is_not_uploaded(trained, hub):
    done(trained, *RUN, "seed=1")
    words = ("export", "*seed1*", "to=release", "anyway=true", "hub=somebody/model")
    assert "this model may not be given away: leave it out" in failed(trained, *words)
    assert not Path("release").exists()
    assert hub.repositories == {}


def test_the_example_on_the_card_runs(trained):
    done(trained, *EXPORT)
    picture(Path("new_images/a.png"))
    code = re.search(r"```python\n(.*?)```", Path("release/README.md").read_text(), re.DOTALL)[1]
    command = re.search(r"pubsel (predict FOLDER.*)", Path("release/README.md").read_text())[1]
    lines = code.replace("FOLDER", "release").strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines[:-1], f"answers = {lines[-1]}"]), scope)
    assert len(scope["answers"]) == 1
    done(trained, *command.replace("FOLDER", "release").split())
    assert Path("answers.csv").read_text().splitlines()[1].split(",")[1] == scope["answers"][0]
