"""``python -m jevany_loadtest.changes A.json B.json``: how the answers of two serial results differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jevany_bench.result import read
from jevany_loadtest.accuracy import answer_changes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="jevany_loadtest.changes", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("baseline", type=Path)
    options = parser.parse_args(arguments)
    try:
        found = answer_changes(read(options.result), read(options.baseline))
    except (OSError, ValueError, KeyError) as error:
        print(f"changes: {error}", file=sys.stderr)
        return 1
    largest = found["largest_probability_change"]
    print(
        f"{found['rows']} requests: {found['argmax_changes']} argmax changes, "
        f"largest probability change {'-' if largest is None else f'{largest:.4f}'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
