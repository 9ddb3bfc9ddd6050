"""``jevany-admin fetch``: a model's files into the Hub cache, whole and as the Hub has them.

The Hub lists a checksum for each file: SHA-256 for the large ones, git's SHA-1 for the others. Every file is hashed
and compared, when it comes or when it was there already; one that differs is fetched once more.
"""

from __future__ import annotations

import hashlib
import http
import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, get_session, hf_raise_for_status, tqdm

from jevany_admin.model_folder import AdminError, parameters, read_config
from jevany_backend.checkpoint.head_file import read_head_file
from jevany_backend.checkpoint.source import (
    FILE_PATTERNS,
    HubReference,
    explained_refusals,
    parse_reference,
    resolve_directory,
)

if TYPE_CHECKING:
    from hashlib import _Hash

GB = 1e9
ATTEMPTS = 5
RETRY_SECONDS = 2.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _File:
    """A file as the Hub lists it."""

    path: str
    size: int
    checksum: str
    large: bool

    @property
    def kind(self) -> str:
        return "SHA-256" if self.large else "git SHA-1"

    def digest(self) -> _Hash:
        return hashlib.sha256() if self.large else hashlib.sha1(b"blob %d\0" % self.size)

    def matches(self, path: Path) -> bool:
        if os.stat(path).st_size != self.size:
            return False
        digest = self.digest()
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest() == self.checksum


def fetch_model(name: str, repository: Path, say: Callable[[str], None]) -> None:
    """Fetch the adapter, the base and the tokenizer of a model, and check every file.

    What is in the cache is not fetched again, and a large file that was broken off goes on where it stopped, also in
    another call.

    Args:
        name: The model's name.
        repository: The directory with the models' folders.
        say: Takes a line for each file.

    Raises:
        AdminError: There is no such model, or a file differs from the Hub's again.
        CheckpointError: The Hub does not have what the model's configuration names, or cannot be reached.
    """
    folder = repository / name
    if not (folder / "config.pbtxt").is_file():
        have = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
        raise AdminError(f"no model {name!r} in {repository}; there are {', '.join(have) or 'none'}")
    settings = parameters(read_config(folder))
    if "adapter" not in settings:
        raise AdminError(f"{folder / 'config.pbtxt'}: no parameter adapter")
    adapter = _fetch(settings["adapter"], "adapter", folder, say)
    _fetch(settings.get("base") or read_head_file(adapter).base_reference, "base", folder, say)
    say(f"{name} is complete; it can be served with HF_HUB_OFFLINE=1")


def _fetch(reference: str, what: str, folder: Path, say: Callable[[str], None]) -> Path:
    place = parse_reference(reference, what, folder)
    if isinstance(place, Path):
        say(f"{what}: {place}: a local directory, nothing to fetch")
        return place
    if constants.HF_HUB_OFFLINE:
        raise AdminError(f"{place}: HF_HUB_OFFLINE is set, and fetching needs the Hub")
    say(str(place))
    with explained_refusals(place):
        commit, files = _list(place)
        fresh = {file.path for file in files if file.large and _fetch_large(place, commit, file)}
    # The library fetches the small files and gives the large ones their places.
    directory = resolve_directory(reference, what, folder)
    for file in files:
        path = directory / file.path
        if file.path not in fresh and not file.matches(path):
            say(f"  {file.path}: not what the Hub has; fetching it again")
            path.resolve().unlink()
            with explained_refusals(place):
                if file.large:
                    _fetch_large(place, commit, file)
            directory = resolve_directory(reference, what, folder)
            if not file.matches(path):
                raise AdminError(f"{place}: {file.path} differs from the Hub's checksum, twice")
        say(f"  {file.path}: {file.size / GB:.3f} GB, {file.kind} as on the Hub")
    return directory


def _list(place: HubReference) -> tuple[str, list[_File]]:
    """Return the commit that a reference means, and its files that serving needs."""
    api = HfApi()
    commit = api.model_info(place.repository, revision=place.revision).sha
    assert commit is not None  # The Hub always says so; the type is for lists of models.
    entries = [
        entry
        for entry in api.list_repo_tree(place.repository, recursive=True, revision=commit)
        if isinstance(entry, RepoFile)
    ]
    wanted = set(filter_repo_objects([entry.path for entry in entries], allow_patterns=FILE_PATTERNS))
    return commit, [
        _File(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id, entry.lfs is not None)
        for entry in entries
        if entry.path in wanted
    ]


def _fetch_large(place: HubReference, commit: str, file: _File) -> bool:
    """Fetch a large file into the cache, under its checksum as the library keeps it; return whether it was needed.

    The library itself throws away what it has of a file when a download ends early; at 30 GB a file that is too much.
    """
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=place.repository, repo_type="model")
    blob = folder / "blobs" / file.checksum
    if blob.exists():
        return False
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.part")
    url = hf_hub_url(place.repository, file.path, revision=commit)
    for _ in range(2):
        if _download(url, part, file):
            part.rename(blob)
            return True
        part.unlink()
    raise AdminError(f"{place}: {file.path} differs from the Hub's checksum, twice")


def _download(url: str, part: Path, file: _File) -> bool:
    """Download the rest of a file, through broken connections; return whether it is what the Hub lists."""
    digest = file.digest()
    with part.open("ab+") as target, tqdm(total=file.size, desc=file.path, unit="B", unit_scale=True) as bar:
        target.seek(0)
        while chunk := target.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
        failures = 0
        while target.tell() < file.size:
            before = target.tell()
            try:
                for chunk in _stream(url, target.tell()):
                    target.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
            except _transport_error():
                failures = 1 if target.tell() > before else failures + 1
                if failures == ATTEMPTS:
                    raise
                time.sleep(RETRY_SECONDS)
    return digest.hexdigest() == file.checksum


def _stream(url: str, start: int) -> Iterator[bytes]:
    """Yield a file's bytes from one of them on, as they come."""
    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
        hf_raise_for_status(response)
        # A server that does not know ranges sends the file from its beginning.
        skip = start if response.status_code == http.HTTPStatus.OK else 0
        for chunk in response.iter_raw():
            rest = chunk[skip:]
            skip -= len(chunk) - len(rest)
            if rest:
                yield rest


def _transport_error() -> type[Exception]:
    """Return what a broken connection raises: the Hub's library runs on httpx, and from version 2 on httpx2."""
    library = type(get_session()).__module__.partition(".")[0]
    return importlib.import_module(library).TransportError
