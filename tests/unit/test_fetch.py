"""``jevany-admin fetch`` against a Hub on this machine: broken connections, corrupt files, use without a network."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from jevany_admin import fetch
from jevany_admin.command_line import main
from jevany_admin.model_folder import config_pbtxt
from jevany_backend.checkpoint import CheckpointError, memory, open_checkpoint
from jevany_backend.encoding import Limits
from jevany_backend.settings import Settings
from tests.checkpoint_factory import make_checkpoint

COMMIT = "c" * 40
LARGE = (".safetensors", ".pt", "tokenizer.json")


class Hub:
    """Repositories by name, each a directory, as the Hub shows them.

    Attributes:
        repositories: The directories.
        cut: File name -> how many bytes of it are sent before the connection breaks, once for each entry.
        corrupt: File name -> how often it is sent with its last byte changed.
        downloads: File name -> the first byte of each download of it.
        ranges: Whether a part of a file can be asked for.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.cut: dict[str, list[int]] = defaultdict(list)
        self.corrupt: dict[str, int] = defaultdict(int)
        self.downloads: dict[str, list[int]] = defaultdict(list)
        self.ranges = True

    def entry(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": path.name, "size": len(content), "oid": blob}
        if path.name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/\w+)(?:/revision/\w+)?", path):
            self._json({"id": match[1], "sha": COMMIT, "siblings": []})
        elif match := re.fullmatch(rf"/api/models/(\w+/\w+)/tree/{COMMIT}", path):
            self._json([self.hub.entry(file) for file in sorted(self.hub.repositories[match[1]].iterdir())])
        elif match := re.fullmatch(rf"/(\w+/\w+)/resolve/{COMMIT}/(.+)", path):
            self._file(self.hub.repositories[match[1]] / match[2], body)
        else:
            self.send_error(404)

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, file: Path, body: bool) -> None:
        entry, content = self.hub.entry(file), file.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if not self.hub.ranges:
            start = 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not body:
            return
        self.hub.downloads[file.name].append(start)
        if self.hub.corrupt[file.name]:
            self.hub.corrupt[file.name] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        end = self.hub.cut[file.name].pop() if self.hub.cut[file.name] else len(content)
        self.wfile.write(content[start:end])
        if end < len(content):
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one checkpoint and its base, and an empty cache."""
    made = make_checkpoint(tmp_path / "made", head_changes={"base": "owner/base"})
    (made.base / "modeling_base.py").write_text("code that nobody may fetch")
    served = Hub()
    served.repositories = {"owner/adapter": made.adapter, "owner/base": made.base}
    handler = type("Handler", (_Handler,), {"hub": served})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        yield served
        server.shutdown()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config_pbtxt("m", "owner/adapter@main", None, None, "float32"))
    return folder.parent


def _fetch(repository: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["fetch", "m", "--repository", str(repository)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_fetched_model_opens_without_a_network(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = _fetch(repository, capsys)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "adapter: owner/adapter at revision main"
    assert re.search(r"^  adapter_model\.safetensors: 0\.000 GB, SHA-256 as on the Hub$", out, re.M)
    assert re.search(r"^  adapter_config\.json: 0\.000 GB, git SHA-1 as on the Hub$", out, re.M)
    assert "base: owner/base" in lines
    assert lines[-1] == "m is complete; it can be served with HF_HUB_OFFLINE=1"
    assert "modeling_base.py" not in hub.downloads
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    files = open_checkpoint("owner/adapter@main")
    assert "layers.0.mlp.up_proj.weight" in files.base.tensors


@pytest.fixture
def load_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Settings], Any]]:
    """What the server loads a model with, outside of Triton."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    module = importlib.import_module("jevany_backend.triton_model")
    monkeypatch.setattr(module, "hide_gpu_kernels", lambda: None)
    yield module.load_model
    del sys.modules["jevany_backend.triton_model"], sys.modules["jevany_backend.metrics"]


def test_what_does_not_fit_is_not_downloaded(
    hub: Hub, load_model: Callable[[Settings], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        name="m",
        directory=Path(),
        adapter="owner/adapter@main",
        base=None,
        random_weights=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
        engine=None,
        limits=Limits(100, 100),
    )
    free = 10**9
    monkeypatch.setattr(memory, "free_memory", lambda device: (free, 4 * 10**9))
    with pytest.raises(CheckpointError, match=r"^not enough memory: the model needs .* has 1\.0 GB free of 4\.0; "):
        load_model(settings)
    assert hub.downloads["config.json"] == [0]
    assert not hub.downloads["model.safetensors"]
    free = 3 * 10**9
    model, mode = load_model(settings)
    assert (model.name, mode) == ("m", "reference")
    assert hub.downloads["model.safetensors"] == [0]


def test_what_is_cached_is_checked_and_not_fetched_again(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fetch(repository, capsys)[0] == 0
    hub.downloads.clear()
    code, out, _ = _fetch(repository, capsys)
    assert code == 0
    assert not hub.downloads
    assert re.search(r"^  model\.safetensors: 0\.00\d GB, SHA-256 as on the Hub$", out, re.M)


def test_a_broken_connection_goes_on_where_it_stopped(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut["model.safetensors"] = [70_000, 1000]
    assert _fetch(repository, capsys)[0] == 0
    assert hub.downloads["model.safetensors"] == [0, 1000, 70_000]


def test_a_hub_without_ranges_sends_the_file_again(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut["model.safetensors"] = [1000]
    hub.ranges = False
    assert _fetch(repository, capsys)[0] == 0
    assert hub.downloads["model.safetensors"] == [0, 0]


def test_a_download_that_was_ended_goes_on_in_the_next_call(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut["model.safetensors"] = [1000]
    monkeypatch.setattr(fetch, "ATTEMPTS", 1)
    code, _, errors = _fetch(repository, capsys)
    assert code == 1
    assert re.search(r"^jevany-admin: base: owner/base: download failed: .+$", errors, re.M)
    assert _fetch(repository, capsys)[0] == 0
    assert hub.downloads["model.safetensors"] == [0, 1000]


@pytest.mark.parametrize("file", ["model.safetensors", "head.pt"])
def test_a_file_corrupted_on_the_way_is_fetched_again(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    hub.corrupt[file] = 1
    assert _fetch(repository, capsys)[0] == 0
    assert hub.downloads[file] == [0, 0]


@pytest.mark.parametrize("file", ["model.safetensors", "adapter_config.json"])
def test_a_file_that_stays_corrupt_is_an_error(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    hub.corrupt[file] = 9
    code, _, errors = _fetch(repository, capsys)
    assert code == 1
    assert re.search(rf"^jevany-admin: \w+: owner/.*: {file} differs from the Hub's checksum, twice$", errors, re.M)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_corrupted_in_the_cache_is_fetched_again(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    assert _fetch(repository, capsys)[0] == 0
    cached = tmp_path / "cache" / "models--owner--base" / "snapshots" / COMMIT / file
    content = cached.read_bytes()
    cached.resolve().write_bytes(content[:-1] + b"!")
    code, out, _ = _fetch(repository, capsys)
    assert code == 0
    assert f"  {file}: not what the Hub has; fetching it again" in out
    assert cached.read_bytes() == content


def test_local_directories_need_no_fetching(
    tmp_path: Path, hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, base = hub.repositories["owner/adapter"], hub.repositories["owner/base"]
    for name, directory in (("adapter", adapter), ("base", base)):
        (repository / "m" / name).symlink_to(directory)
    (repository / "m" / "config.pbtxt").write_text(config_pbtxt("m", "adapter", "base", None, "float32"))
    code, out, _ = _fetch(repository, capsys)
    assert code == 0
    assert f"base: {base}: a local directory, nothing to fetch" in out
    assert not hub.downloads


def test_without_a_network_nothing_is_fetched(
    hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, errors = _fetch(repository, capsys)
    assert code == 1
    assert errors == (
        "jevany-admin: adapter: owner/adapter at revision main: HF_HUB_OFFLINE is set, and fetching needs the Hub\n"
    )


def test_an_unknown_model_is_named(hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "n", "--repository", str(repository)]) == 1
    assert capsys.readouterr().err.endswith(f"jevany-admin: no model 'n' in {repository}; there are m\n")
