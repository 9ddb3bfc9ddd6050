"""The base model's files: its text decoder's configuration and weights, out of whatever wraps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from jevany_backend.checkpoint.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A base is often a multimodal checkpoint; its text decoder stands under one of these.
_DECODER_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


class BaseFiles:
    """A base model on disk.

    Args:
        directory: Holds ``config.json`` and ``model.safetensors`` or its shards with their index.

    Raises:
        CheckpointError: A file is missing or broken, or there is no text decoder in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _read_text_config(directory)
        self._shard_of = _index_tensors(directory)
        self._prefix = self._find_prefix()

    def _find_prefix(self) -> str:
        for prefix in _DECODER_PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._shard_of:
                return prefix
        raise CheckpointError(f"{self.directory}: no text decoder: there is no embed_tokens.weight in its tensors")

    @property
    def shards(self) -> list[Path]:
        """The files that hold the text decoder, in order."""
        names = {file for name, file in self._shard_of.items() if name.startswith(self._prefix)}
        return [self.directory / name for name in sorted(names)]

    def decoder_tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the text decoder's tensors one at a time, shard by shard.

        Args:
            device: Where each tensor is read to.

        Yields:
            The tensor's name in the text decoder (``layers.0.mlp.up_proj.weight``) and the tensor as stored.

        Raises:
            CheckpointError: A shard is missing or broken.
        """
        for shard in self.shards:
            with _open(shard, device) as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                    if name.startswith(self._prefix):
                        yield name.removeprefix(self._prefix), file.get_tensor(name)

    def head_rows(self, rows: list[int], device: torch.device) -> torch.Tensor:
        """Read some rows of the vocabulary head, which is the embedding matrix where the two are tied.

        Args:
            rows: Token ids, R of them.
            device: Where the rows are read to.

        Returns:
            (R, hidden), as stored.

        Raises:
            CheckpointError: The base has no head of its own and its embeddings are not tied.
        """
        name = next((name for name in _HEAD_NAMES if name in self._shard_of), None)
        if self.config.tie_word_embeddings or name is None:
            if not self.config.tie_word_embeddings:
                raise CheckpointError(f"{self.directory}: no lm_head.weight, and the embeddings are not tied to it")
            name = f"{self._prefix}embed_tokens.weight"
        with _open(self.directory / self._shard_of[name], device) as file:
            part = file.get_slice(name)
            return torch.stack([part[row] for row in rows])


def _read_text_config(directory: Path) -> PretrainedConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; {directory} is not a base model")
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from None


def _index_tensors(directory: Path) -> dict[str, str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{index}: not an index of safetensors shards") from None
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or not (directory / file).is_file():
                raise CheckpointError(f"{directory / file}: missing, but {index.name} names it")
        return weight_map
    single = directory / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(f"{directory}: neither model.safetensors nor model.safetensors.index.json")
    with _open(single, torch.device("cpu")) as file:
        return dict.fromkeys(file.keys(), single.name)


def _open(path: Path, device: torch.device) -> safe_open:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
