"""Writes held-out decisions as a panel: `python -m jevany_tiny.panel build/tiny-held-out.jsonl`.

They are the ones that `jevany_tiny.evaluate` tests, so `make bench` can say on them how many answers a mode changes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jevany_tiny.decisions import take
from jevany_tiny.evaluate import TEST_SEED


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m jevany_tiny.panel", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the file to write, JSON lines")
    parser.add_argument("--rows", type=int, default=2000, help="how many decisions")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for number, example in enumerate(take("heldout", TEST_SEED, options.rows)):
            line = {
                "id": f"held-out-{number:04d}",
                "domain": example.domain,
                **example.request(),
                "label": example.label,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
