"""What can be wrong with a checkpoint."""


class CheckpointError(Exception):
    """A checkpoint or base cannot be served; the message names the file and what would help."""
