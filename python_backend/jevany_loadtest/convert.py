"""``python -m jevany_loadtest.convert``: make a panel of benchmark files that the user brings.

``jevbench``: the public files ``easy.jsonl``, ``original.jsonl`` and ``hard.jsonl`` of fstandhartinger/jevbench, 231
requests. ``transfer``: ``development.jsonl`` of Kev's suite transfer-v9, 1,264 requests, of which 1,046 are scored:
the others get no label. The benchmarks' own terms hold for the panel as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jevany_backend.protocol import DecisionError, question_from_json

ROOT = Path(__file__).parents[2]
# Format -> the panel's name, its requests and how many of them have a label, as published.
PUBLISHED = {"jevbench": ("jevbench-231", 231, 231), "transfer": ("transfer-1264", 1264, 1046)}
# Of these sources only the unchanged records are scored; the changed ones test something else.
_CLEAN_ONLY = ("mmlu", "emotion", "sciq")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when the counts are the published ones."""
    options = _parser().parse_args(arguments)
    name, requests, labels = PUBLISHED[options.format]
    read = jevbench_record if options.format == "jevbench" else transfer_record
    out = options.out or ROOT / "build" / "panels" / f"{name}.jsonl"
    records = []
    try:
        for path in options.files:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.strip():
                    records.append(_located(read, line, f"{path}: line {number}"))
    except (OSError, ValueError) as error:
        print(f"convert-panel: {error}", file=sys.stderr)
        return 1
    found = len(records), sum("label" in record for record in records)
    if found != (requests, labels):
        print(
            f"convert-panel: {found[0]} requests, {found[1]} with a label; published are {requests} and {labels}",
            file=sys.stderr,
        )
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    print(f"{out}: {found[0]} requests, {found[1]} with a label")
    return 0


def _located(read: Any, line: str, place: str) -> dict[str, Any]:
    try:
        return read(json.loads(line))
    except (ValueError, KeyError, TypeError, DecisionError) as error:
        raise ValueError(f"{place}: {error!r}") from None


def jevbench_record(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a panel's line of a JevBench task: ``id``, ``state``, ``question`` and ``expected``.

    ``expected`` is an option's key, ``yes`` or ``no``, or a score's level; where it is a distribution over them, its
    likeliest counts.

    Raises:
        ValueError: It is something else.
    """
    question = {key: entry["question"][key] for key in ("type", "instructions", "criteria") if key in entry["question"]}
    record = {"id": entry["id"], "state": entry["state"], "questions": {"decision": question}}
    expected: Any = entry.get("expected")
    if isinstance(expected, dict):
        expected = max(expected.items(), key=lambda option: option[1])[0]
    return record if expected is None else record | {"label": label_of(question, expected)}


def transfer_record(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a panel's line of a Transfer record: ``state``, one question with ``label``, ``_meta``.

    Raises:
        ValueError: It is something else.
    """
    [(name, asked)] = entry["questions"].items()
    question = {key: asked[key] for key in ("type", "instructions", "criteria") if key in asked}
    meta = entry["_meta"]
    record = {"id": meta["id"], "state": entry["state"], "questions": {name: question}, "family": meta["source"]}
    changed = meta["source"] in _CLEAN_ONLY and meta["variant"] != "clean"
    if meta["source"] == "unknowable" or changed:
        return record
    return record | {"label": label_of(question, asked["label"])}


def label_of(question: dict[str, Any], expected: Any) -> int:
    """Return the number of the right option, in the order in which a model sees them.

    Raises:
        ValueError: There is no such option.
    """
    keys = list(question_from_json(question, "question").keys)
    if question["type"] == "score":
        label = int(expected)
        if 0 <= label < len(keys):
            return label
    elif question["type"] == "noul":
        # No comes before yes.
        words = {"no": 0, "false": 0, "yes": 1, "true": 1}
        if (word := str(expected).lower()) in words:
            return words[word]
    elif expected in keys:
        return keys.index(expected)
    raise ValueError(f"{expected!r} is no option of a {question['type']} with {len(keys)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jevany_loadtest.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("format", choices=PUBLISHED)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, help="the panel; build/panels/NAME.jsonl if not given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
