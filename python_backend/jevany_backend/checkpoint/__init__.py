"""A JevAny checkpoint: adapter, head and tokenizer, and the base model they belong to."""

from jevany_backend.checkpoint.errors import CheckpointError, first_line
from jevany_backend.checkpoint.load import CheckpointFiles, load_readout, load_text_model, open_checkpoint

__all__ = ["CheckpointError", "CheckpointFiles", "first_line", "load_readout", "load_text_model", "open_checkpoint"]
