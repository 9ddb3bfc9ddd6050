"""A JevAny checkpoint: adapter, head and tokenizer, and the base model they belong to."""

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.load import (
    CheckpointFiles,
    check_shape_fits,
    load_readout,
    load_text_model,
    memory_need,
    open_checkpoint,
    plan,
)
from jevany_backend.checkpoint.random_weights import RandomRelease, open_random, random_readout, random_text_model

__all__ = [
    "CheckpointError",
    "CheckpointFiles",
    "RandomRelease",
    "check_shape_fits",
    "first_line",
    "load_readout",
    "load_text_model",
    "memory_need",
    "open_checkpoint",
    "open_random",
    "plan",
    "random_readout",
    "random_text_model",
]
