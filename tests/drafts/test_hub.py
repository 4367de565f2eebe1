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
from support.draft_files import write_gguf_draft
from support.fixtures import draft_config, draft_weights, save_draft

pytestmark = pytest.mark.process

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


def load(url, home, names, offline=False):
    """Load drafts in a new process. names: (repository, revision). Returns ("ok", block size) or (error, message) each."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(names)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_downloads_and_errors(hub, tmp_path):
    names = [
        ("acme/draft", None),
        ("acme/draft", OTHER_COMMIT),
        ("acme/files/draft.gguf", None),
        ("acme/mimo", None),
        ("acme/target", None),
        ("acme/absent", None),
        ("acme/gated", None),
        ("acme/files", None),
        ("acme/draft", "nosuch"),
        ("acme/files/absent.gguf", None),
    ]
    found = load(hub.url, tmp_path, names)
    assert found[:4] == [["ok", 6], ["ok", 4], ["ok", 6], ["ok", 6]]
    fetched = set(hub.fetched)
    assert not [name for name in fetched if name.endswith((".py", ".bin"))], (
        "only configurations and weights are downloaded"
    )
    assert "acme/target/model.safetensors" not in fetched and "acme/mimo/model.safetensors" not in fetched
    assert "acme/mimo/dflash/model.safetensors" in fetched
    messages = [
        "load it with load",
        "neither a local folder nor a repository",
        "is gated: accept its terms",
        "FILE.gguf",
        "no such revision",
        "absent.gguf",
    ]
    for (kind, message), expected in zip(found[4:], messages):
        assert kind == "ValueError" and expected in message, message
    # Again, without the hub: from the cache, or a message that says so.
    assert load(hub.url, tmp_path, [("acme/draft", None), ("acme/other", None)], offline=True)[0] == ["ok", 6]
    kind, message = load("http://127.0.0.1:9", tmp_path / "empty", [("acme/draft", None)], offline=True)[0]
    assert kind == "ValueError" and "cannot be reached" in message
