"""Drafts from the hub, against a local stand-in of its HTTP interface: what is downloaded, and what errors say."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from support.draft_files import write_gguf_draft
from support.drafts import draft_config, draft_weights
from support.folders import save_draft

import mlx_dflash

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "f" * 40
SCRIPT = """
import json, sys
import mlx_dflash
found = []
for name, revision in json.loads(sys.argv[1]):
    try:
        found.append(["ok", mlx_dflash.load_draft(name, revision=revision).config.block_size])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories. repos: "owner/name" -> {commit: folder}; main is the first commit."""

    def __init__(self, repos, gated=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.gated, self.fetched = repos, gated, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.partition("?")[0].strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        if repo not in self.server.repos:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        commits = self.server.repos[repo]
        revision = parts[3] if len(parts) > 3 else "main"
        commit = next(iter(commits)) if revision == "main" else revision
        if commit not in commits:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = Path(commits[commit])
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if path.startswith("api/") and parts[2:3] == ["tree"]:
            listing = [
                {"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": blob_id(folder / n)}
                for n in names
            ]
            return self.reply(200, json.dumps(listing).encode())
        if path.startswith("api/"):
            siblings = [{"rfilename": n} for n in names]
            return self.reply(
                200, json.dumps({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}).encode()
            )
        if repo in self.server.gated:
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        file = folder / "/".join(parts[4:])
        if not file.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.server.fetched.append(f"{repo}/{'/'.join(parts[4:])}")
        self.reply(200, file.read_bytes(), {"ETag": f'"{blob_id(file)}"', "X-Repo-Commit": commit})

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def blob_id(file):
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    config = draft_config()
    main = save_draft(root / "main", config, draft_weights(config), shards=2)
    (main / "dflash.py").write_text("raise SystemExit")
    (main / "pytorch_model.bin").write_bytes(b"never fetched")
    other = save_draft(root / "other", draft_config(dict(block_size=4)), draft_weights(config))
    target = root / "target"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (target / "model.safetensors").write_bytes(bytes(1000))
    files = root / "files"
    files.mkdir()
    write_gguf_draft(files / "draft.gguf", config, draft_weights(config))
    mimo = root / "mimo"
    mimo.mkdir()
    (mimo / "config.json").write_text('{"model_type": "mimo", "architectures": ["MiMo"]}')
    (mimo / "model.safetensors").write_bytes(bytes(1000))
    save_draft(mimo / "dflash", config, draft_weights(config))
    repos = {"acme/draft": {COMMIT: main, OTHER_COMMIT: other}, "acme/target": {COMMIT: target}}
    repos |= {"acme/files": {COMMIT: files}, "acme/mimo": {COMMIT: mimo}, "acme/gated": {COMMIT: main}}
    server = Hub(repos, gated=["acme/gated"])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()


def environment(url, home, **more):
    """Variables of a process that takes `url` for the hub and `home` for its cache."""
    hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**os.environ, **hub, **more}


def load(url, home, names, offline=False):
    """Load drafts, (repository, revision) each, in a new process. Returns ("ok", block size) or (error, text) each."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(names)],
        env=environment(url, home, **({"HF_HUB_OFFLINE": "1"} if offline else {})),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


DRAFTS = {
    "a repository": ("acme/draft", None, 6),
    "a commit of it": ("acme/draft", OTHER_COMMIT, 4),
    "a GGUF file in a repository": ("acme/files/draft.gguf", None, 6),
    "a draft in its target's repository": ("acme/mimo", None, 6),
}
REFUSED = {
    "a target": ("acme/target", None, "load it with load"),
    "no repository": ("acme/absent", None, "neither a local folder nor a repository"),
    "a gated repository": ("acme/gated", None, "is gated: accept its terms"),
    "a repository of GGUF files": ("acme/files", None, "FILE.gguf"),
    "no revision": ("acme/draft", "nosuch", "no such revision"),
    "no file of the repository": ("acme/files/absent.gguf", None, "absent.gguf"),
}


@pytest.fixture(scope="module")
def visit(hub, tmp_path_factory):
    """Load all of DRAFTS and REFUSED in one process. Returns (case -> outcome, files fetched, cache folder)."""
    home, cases = tmp_path_factory.mktemp("home"), DRAFTS | REFUSED
    found = load(hub.url, home, [(name, revision) for name, revision, _ in cases.values()])
    return dict(zip(cases, found)), set(hub.fetched), home


@pytest.mark.parametrize("what", DRAFTS)
def test_a_draft_on_the_hub_loads_by_its_name(visit, what):
    assert visit[0][what] == ["ok", DRAFTS[what][2]]


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_hub_does_not_give_is_named_with_what_to_do(visit, what):
    kind, message = visit[0][what]
    assert kind == "ValueError" and REFUSED[what][2] in message, message


def test_convert_names_what_the_hub_does_not_give_in_one_line(hub, tmp_path):
    command = [sys.executable, "-m", "convert", "--hf-path", "acme/absent", "--mlx-path", str(tmp_path / "mlx")]
    done = subprocess.run(command, env=environment(hub.url, tmp_path), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == (
        "error: acme/absent is neither a local folder nor a repository of the hub that you may read\n"
    )


def test_only_configurations_and_weights_are_downloaded(visit):
    fetched = visit[1]
    assert {"acme/draft/config.json", "acme/mimo/dflash/model.safetensors"} <= fetched
    assert not [name for name in fetched if name.endswith((".py", ".bin"))]


def test_the_weights_of_a_target_are_never_downloaded(visit):
    fetched = visit[1]
    assert "acme/target/config.json" in fetched
    assert not fetched & {"acme/target/model.safetensors", "acme/mimo/model.safetensors"}


def test_a_downloaded_draft_loads_again_without_the_hub(hub, visit):
    names = [("acme/draft", None), ("acme/other", None)]
    loaded, (kind, message) = load(hub.url, visit[2], names, offline=True)
    assert loaded == ["ok", 6]
    assert kind == "ValueError" and "cannot be reached" in message, message


def test_a_hub_that_cannot_be_reached_is_named(tmp_path):
    kind, message = load("http://127.0.0.1:9", tmp_path, [("acme/draft", None)])[0]
    assert kind == "ValueError" and "cannot be reached" in message, message


def test_a_target_that_cannot_be_downloaded_is_named(monkeypatch):
    def offline(*arguments, **options):
        raise LocalEntryNotFoundError("ConnectError: Name or service not known")

    monkeypatch.setattr("mlx_lm.utils.snapshot_download", offline)
    with pytest.raises(ValueError, match="some-owner/some-model is neither a local folder nor in the hub's cache"):
        mlx_dflash.load("some-owner/some-model")
