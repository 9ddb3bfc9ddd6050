"""What can be wrong with a checkpoint."""


class CheckpointError(Exception):
    """A checkpoint or base cannot be served; the message names the file and what would help."""


def first_line(error: BaseException) -> str:
    """Return what an error says in one line: the first of its message, or its name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
