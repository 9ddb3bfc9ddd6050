"""A model of the repository, loaded in this process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jevany_backend.checkpoint import (
    RandomRelease,
    load_readout,
    load_text_model,
    open_checkpoint,
    open_random,
    random_readout,
    random_text_model,
)
from jevany_backend.checkpoint.load import CheckpointFiles
from jevany_backend.encoding import Limits, Row, RowEncoder
from jevany_backend.settings import DTYPES
from jevany_bench.panel import Panel, encoded_row, synthetic_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jevany_backend.readout import Readout

# As the files of this repository write it. Their own format's library is not needed to measure.
_PARAMETER = re.compile(r'parameters\s*\{\s*key:\s*"(\w+)"\s*value:\s*\{\s*string_value:\s*"([^"]*)"\s*\}\s*\}')


@dataclass(frozen=True)
class Candidate:
    """A model that will be measured.

    Attributes:
        name: Its folder's name.
        files: The checkpoint's files, or a release of which only the shape is real.
        dtype: What it is served in.
    """

    name: str
    files: CheckpointFiles | RandomRelease
    dtype: torch.dtype

    @property
    def random(self) -> bool:
        """Whether its weights are random."""
        return isinstance(self.files, RandomRelease)

    def rows(self, panel: Panel) -> list[Row]:
        """Return the panel's rows: encoded by the model's tokenizer, or of random tokens where it has none.

        Raises:
            ValueError: It has none, and the panel does not say how long its rows are.
        """
        files = self.files
        if isinstance(files, RandomRelease):
            return [
                self.synthetic_row(request.id, tokens, len(request.question.option_texts))
                for request, tokens in zip(panel.requests, panel.row_lengths(), strict=True)
            ]
        encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels, Limits(1 << 20, 1 << 20))
        return [encoded_row(request, encoder) for request in panel.requests]

    def synthetic_row(self, name: str, tokens: int, options: int) -> Row:
        """Return a row of random tokens, none of which gives structure; see `panel.synthetic_row`."""
        delimiters = self.files.delimiters.ids
        return synthetic_row(name, tokens, options, delimiters, min(self.files.config.vocab_size, *delimiters))

    def load(self, device: torch.device, longest: int) -> tuple[PreTrainedModel, Readout]:
        """Load its weights.

        Args:
            device: Where.
            longest: The longest row, in tokens.

        Raises:
            CheckpointError: The files do not fit each other, or the device is too small.
        """
        if isinstance(self.files, RandomRelease):
            model = random_text_model(self.files, device, self.dtype, longest)
            return model, random_readout(self.files, model, self.dtype)
        model = load_text_model(self.files, device, self.dtype, longest)
        return model, load_readout(self.files, device, self.dtype)


def find_candidate(folder: Path, weights: str | None) -> Candidate:
    """Open a model's checkpoint as the server would.

    Args:
        folder: The model's folder in the repository.
        weights: ``random`` or ``checkpoint`` in the place of what its ``config.pbtxt`` says.

    Raises:
        OSError: There is no such model.
        KeyError: Its configuration lacks a parameter.
        CheckpointError: The checkpoint's files cannot be found or read.
    """
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    parameters = dict(_PARAMETER.findall("\n".join(line.partition("#")[0] for line in text.splitlines())))
    arguments = (parameters["adapter"], parameters.get("base"))
    is_random = (weights or parameters.get("weights", "checkpoint")) == "random"
    opened = open_random if is_random else open_checkpoint
    return Candidate(folder.name, opened(*arguments, relative_to=folder), DTYPES[parameters["dtype"]])
