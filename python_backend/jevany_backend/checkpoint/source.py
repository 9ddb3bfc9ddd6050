"""Where a checkpoint's files are: a local directory, or a Hub repository in the local cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jevany_backend.checkpoint.errors import CheckpointError, first_line

_HUB_REFERENCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?", re.ASCII)

# Data only. Python files of a repository are never fetched, so remote code cannot run.
FILE_PATTERNS = ["*.json", "*.safetensors", "*.pt", "*.txt", "*.jinja", "*.model", "*.tiktoken"]


@dataclass(frozen=True)
class HubReference:
    """A repository on the Hub.

    Attributes:
        what: What it is for, for messages: ``adapter`` or ``base``.
        repository: ``owner/name``.
        revision: A branch, tag or commit; None for the main branch.
    """

    what: str
    repository: str
    revision: str | None

    @property
    def name(self) -> str:
        """``owner/name`` or ``owner/name@revision``."""
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def __str__(self) -> str:
        return f"{self.what}: {self.repository}" + (f" at revision {self.revision}" if self.revision else "")


def parse_reference(reference: str, what: str, relative_to: Path | None = None) -> Path | HubReference:
    """Return what a reference to a checkpoint or a base means.

    Args:
        reference: A directory, or ``owner/repository`` on the Hub, optionally ``@revision``.
        what: What is looked for, for messages: ``"adapter"`` or ``"base"``.
        relative_to: The directory that a relative path starts from; the working directory if None.

    Returns:
        A directory that exists, or a repository on the Hub.

    Raises:
        CheckpointError: It is neither.
    """
    start = relative_to or Path()
    directory = start / Path(reference).expanduser()
    if directory.is_dir():
        return directory.resolve()
    # A mistyped path must not become a download: what begins like a directory that exists is a path.
    match = _HUB_REFERENCE.fullmatch(reference)
    if match is None or reference.startswith(".") or (start / Path(reference).parts[0]).is_dir():
        raise CheckpointError(
            f"{what}: no directory {reference!r}, and that is not a Hub name (owner/repository@revision)"
        )
    return HubReference(what, match["repository"], match["revision"])


def resolve_directory(
    reference: str, what: str, relative_to: Path | None = None, before_download: Callable[[Path], None] | None = None
) -> Path:
    """Return the local directory that holds a checkpoint or a base, downloading it where needed.

    A download shows a progress bar for each file and lands in the Hub cache (``HF_HOME``). With ``HF_HUB_OFFLINE=1``
    only the cache is read.

    Args:
        reference: A directory, or ``owner/repository`` on the Hub, optionally ``@revision``.
        what: What is looked for, for messages: ``"adapter"`` or ``"base"``.
        relative_to: The directory that a relative path starts from; the working directory if None.
        before_download: Called with a directory that has only ``config.json``, before all else is downloaded. What it
            raises ends the download there.

    Raises:
        CheckpointError: There is no such directory or repository, it is gated, or it is not cached while offline.
    """
    place = parse_reference(reference, what, relative_to)
    if isinstance(place, Path):
        return place
    with explained_refusals(place):
        # Told that it is offline, the library accepts a cached commit without asking the Hub for its list of files.
        offline = constants.HF_HUB_OFFLINE
        if before_download is not None and not offline:
            shape = snapshot_download(place.repository, revision=place.revision, allow_patterns=["config.json"])
            before_download(Path(shape))
        snapshot = snapshot_download(
            place.repository, revision=place.revision, allow_patterns=FILE_PATTERNS, local_files_only=offline
        )
    return Path(snapshot)


@contextlib.contextmanager
def explained_refusals(at: HubReference) -> Iterator[None]:
    """Turn what the Hub's library raises into one line that says what to do.

    Raises:
        CheckpointError: The body failed.
    """
    try:
        yield
    except GatedRepoError:
        raise CheckpointError(
            f"{at} is gated: accept its terms on the Hub, then set HF_TOKEN to a token of that account"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{at}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{at}: no such repository, or it is private and HF_TOKEN does not open it") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{at} is not in the local cache and the Hub cannot be reached (is HF_HUB_OFFLINE set?); "
            "fetch it once with a connection, or give a local directory"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:
        # Whatever else the Hub's library or its HTTP library raises, the files are not there.
        raise CheckpointError(f"{at}: download failed: {first_line(error)}") from error
