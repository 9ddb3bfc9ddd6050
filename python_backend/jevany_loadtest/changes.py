"""``python -m jevany_loadtest.changes A.json B.json``: how the answers of two results of ``make loadtest`` differ."""

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
        results = [read(path) for path in (options.result, options.baseline)]
        for path, result in zip((options.result, options.baseline), results, strict=True):
            if result["kind"] == "bench":
                raise ValueError(
                    f"{path}: a result of make bench, which compares the modes in it; answers are not in it"
                )
        found = answer_changes(*results)
    except (OSError, ValueError) as error:
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
