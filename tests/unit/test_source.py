"""Finding a checkpoint's files: directories, the Hub's cache, and what is said when there is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

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
def test_a_cached_repository_is_found_offline(
    offline_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    snapshot_download = source.snapshot_download
    cache = tmp_path / "hub"
    monkeypatch.setattr(source, "snapshot_download", lambda *a, **k: snapshot_download(*a, **k, cache_dir=cache))
    assert resolve_directory(reference, "base") == offline_cache


@pytest.mark.parametrize("reference", ["owner/other", "owner/name@v3"])
def test_what_is_not_cached_is_named_offline(offline_cache: Path, reference: str) -> None:
    name = reference.replace("@", " at revision ")
    with pytest.raises(CheckpointError, match=f"base: {name} is not in the local cache"):
        resolve_directory(reference, "base")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (GatedRepoError, "base: owner/name at revision v2 is gated: accept its terms on the Hub, then set HF_TOKEN"),
        (RepositoryNotFoundError, "base: owner/name at revision v2: no such repository, or it is private"),
        (RevisionNotFoundError, "base: owner/name at revision v2: the repository has no such revision"),
        (httpx.ConnectError, "base: owner/name at revision v2: download failed"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception], message: str
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        request = httpx.Request("GET", "http://127.0.0.1/")
        if failure is httpx.ConnectError:
            raise failure("refused")
        raise failure("refused", response=httpx.Response(403, request=request))  # type: ignore[call-arg]

    monkeypatch.setattr(source, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message):
        resolve_directory("owner/name@v2", "base")


def test_a_mistyped_path_does_not_become_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "snapshot_download", None)
    (tmp_path / "1").mkdir()
    for reference in ("1/chekpoint", "./runs/x", "../x", "/nowhere/x", "~/nowhere-at-all/x", "a/b/c", "runs", "a b/c"):
        with pytest.raises(CheckpointError, match=r"adapter: no directory .*, and that is not a Hub name"):
            resolve_directory(reference, "adapter", relative_to=tmp_path)
