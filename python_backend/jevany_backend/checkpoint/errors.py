"""What can be wrong with a checkpoint."""


class CheckpointError(Exception):
    """A checkpoint or base cannot be served; the message names the file and what would help."""


def first_line(error: BaseException) -> str:
    """Return what an error says in one line: the first of its message, or its name where it has none.

    A line that ends in a colon says nothing yet, so the next one comes with it.
    """
    first, *rest = (str(error).strip() or type(error).__name__).splitlines()
    while first.endswith(":") and rest:
        first = f"{first} {rest.pop(0).strip()}"
    return first
