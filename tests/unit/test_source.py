"""Finding a checkpoint's files: directories, the Hub's cache, and what is said when there is nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from jevany_backend.checkpoint import CheckpointError, source
from jevany_backend.checkpoint.source import resolve_directory


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one repository in it, in offline mode."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    for revision in ("main", "v2"):
        (repository / "refs" / revision).write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("reference", ["owner/name", "owner/name@v2", "owner/name@" + "0" * 40])
def test_a_cached_repository_is_found_offline(offline_cache: Path, reference: str) -> None:
    assert resolve_directory(reference, "base") == offline_cache


@pytest.mark.parametrize("reference", ["owner/other", "owner/name@v3"])
def test_what_is_not_cached_is_named_offline(offline_cache: Path, reference: str) -> None:
    name = reference.replace("@", " at revision ")
    with pytest.raises(CheckpointError, match=f"base: {name} is not in the local cache"):
        resolve_directory(reference, "base")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """A Hub on this machine that refuses every request with the status and error code appended to the list."""
    refusals: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = refusals[-1]
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield refusals
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "base: owner/name at revision v2 is gated: accept its terms on the Hub, then set HF_TOKEN"),
        (404, "RepoNotFound", "base: owner/name at revision v2: no such repository, or it is private"),
        (404, "RevisionNotFound", "base: owner/name at revision v2: the repository has no such revision"),
        (500, "", "base: owner/name at revision v2 is not in the local cache and the Hub cannot be reached"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(hub: list[tuple[int, str]], status: int, code: str, message: str) -> None:
    hub.append((status, code))
    with pytest.raises(CheckpointError, match=message) as raised:
        resolve_directory("owner/name@v2", "base")
    assert "\n" not in str(raised.value)


def test_a_mistyped_path_does_not_become_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "snapshot_download", None)
    (tmp_path / "1").mkdir()
    for reference in ("1/chekpoint", "./runs/x", "../x", "/nowhere/x", "~/nowhere-at-all/x", "a/b/c", "runs", "a b/c"):
        with pytest.raises(CheckpointError, match=r"adapter: no directory .*, and that is not a Hub name"):
            resolve_directory(reference, "adapter", relative_to=tmp_path)
