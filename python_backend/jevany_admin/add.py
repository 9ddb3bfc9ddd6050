"""``jevany-admin add``: a model's folder from a checkpoint, checked before it is there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jevany_admin.model_folder import AdminError, check_name, config_pbtxt, model_py, read_config
from jevany_backend.checkpoint import CheckpointFiles, memory_need, open_checkpoint, plan
from jevany_backend.checkpoint.memory import GB, MemoryNeed, free_memory
from jevany_backend.checkpoint.source import HubReference, parse_reference
from jevany_backend.settings import Settings, read_settings


@dataclass(frozen=True)
class Added:
    """A model that was added.

    Attributes:
        folder: Its folder.
        files: Its checkpoint.
        need: The memory that it will take.
        device: Where it will run.
    """

    folder: Path
    files: CheckpointFiles
    need: MemoryNeed
    device: torch.device

    def lines(self) -> Iterator[str]:
        """Yield what there is to know about it, a line each."""
        config, files = self.files.config, self.files
        readout = "direct token" if files.labels is not None else "pointer"
        yield f"{self.folder}: added"
        yield f"  checkpoint  {files.directory}"
        yield f"  base        {files.base.directory}: {config.model_type}, {config.num_hidden_layers} layers"
        yield f"  readout     {readout}, temperature {files.head.temperature:g}"
        yield f"  device      {self.device}"
        yield f"  memory      {self.need}"
        if self.device.type == "cuda" and self.device.index >= torch.cuda.device_count():
            yield f"warning: this machine has no GPU {self.device.index}; a model for its CPU is added with --cpu"
        else:
            free, total = free_memory(self.device)
            verdict = "fits" if self.need.total <= free else "does NOT fit now"
            yield f"              {verdict}: {free / GB:.1f} GB of {total / GB:.1f} are free here"


def add_model(checkpoint: str, name: str, repository: Path, base: str | None, gpu: int | None, dtype: str) -> Added:
    """Write a model's folder, after opening its checkpoint as the server would, without its weights.

    Args:
        checkpoint: A directory, to which the folder gets a symbolic link, or ``owner/repository[@revision]``, which is
            downloaded where it is not cached.
        name: The model's name.
        repository: The directory with the models' folders.
        base: The base, likewise; None for the one that the checkpoint names.
        gpu: The GPU to run on; None for the CPU.
        dtype: What to serve the weights in.

    Raises:
        AdminError: The name cannot be used.
        CheckpointError: The checkpoint cannot be served.
        SettingsError: The settings cannot be.
    """
    check_name(name)
    if not repository.is_dir():
        raise AdminError(f"{repository}: no such directory")
    folder = repository / name
    if folder.exists():
        raise AdminError(f"{folder}: there already; choose another name or remove it")
    places = {"checkpoint": parse_reference(checkpoint, "adapter")}
    if base is not None:
        places["base"] = parse_reference(base, "base")
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    # Only a model that passed every check gets its name.
    with tempfile.TemporaryDirectory(dir=repository, prefix=".jevany-admin-") as temporary:
        draft = Path(temporary) / "model"
        (draft / "1").mkdir(parents=True)
        (draft / "1" / "model.py").write_text(model_py(), encoding="utf-8")
        references = {what: _reference(place, draft, f"1/{what}") for what, place in places.items()}
        text = config_pbtxt(name, references["checkpoint"], references.get("base"), gpu, dtype)
        (draft / "config.pbtxt").write_text(text, encoding="utf-8")
        settings = _settings(draft)
        files = open_checkpoint(settings.adapter, settings.base, relative_to=draft)
        need = memory_need(files, plan(files, settings.dtype), settings.limits.row_tokens)
        draft.rename(folder)
    return Added(folder, files, need, device)


def _reference(place: Path | HubReference, folder: Path, link: str) -> str:
    """Return what the configuration calls a checkpoint or a base; for a directory, make the link that it names."""
    # Triton shows the configuration to every caller, and no caller is to learn where this machine has its files.
    if isinstance(place, HubReference):
        return place.name
    (folder / link).symlink_to(place, target_is_directory=True)
    return link


def _settings(folder: Path) -> Settings:
    # The place is left out: the server's machine may have GPUs that this one lacks.
    config = read_config(folder)
    return read_settings(
        {
            "model_config": json.dumps(config),
            "model_name": config["name"],
            "model_repository": str(folder),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
