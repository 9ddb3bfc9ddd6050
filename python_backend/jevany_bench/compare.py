"""``python -m jevany_bench.compare``: answer a panel in several modes, and say how far answers move between them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from jevany_backend.checkpoint import CheckpointError
from jevany_backend.engine.modes import MODES, build_engine
from jevany_backend.engine.reference import hide_gpu_kernels
from jevany_bench.models import find_candidate
from jevany_bench.panel import Panel, read_panel
from jevany_bench.progress import Progress
from jevany_bench.protocol import Samples, changes
from jevany_loadtest.accuracy import accuracy

_ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 if every mode has answered every request."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.cpu else torch.device("cpu")
    if device.type == "cpu":
        hide_gpu_kernels()
    try:
        panel = read_panel(options.panel)
        candidate = find_candidate(options.repository / options.model, None)
        if candidate.random:
            raise CheckpointError(f"{options.model}: random weights have no answers to compare")
        rows = candidate.rows(panel)
        longest = max(len(row.ids) for row in rows)
        model, readout = candidate.load(device, longest)
        answers: dict[str, Samples] = {}
        # The engine takes the weights out of the model, so it comes last, as in MODES; the first named is the baseline.
        for mode in sorted(options.modes, key=list(MODES).index):
            engine = build_engine(mode, model, readout, longest)
            answers[mode] = Samples()
            bar = Progress(f"{options.model} {mode}: requests", len(rows))
            for place, row in enumerate(rows):
                answers[mode].probabilities[place] = [float(value) for value in engine.probabilities(row)]
                bar.to(place + 1)
            bar.end()
    except (OSError, ValueError, KeyError, CheckpointError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncompare: stopped", file=sys.stderr)
        return 130
    print(table(panel, {mode: answers[mode] for mode in options.modes}), flush=True)
    return 0


def table(panel: Panel, answers: dict[str, Samples]) -> str:
    """Return the comparison in Markdown.

    Args:
        panel: What was asked.
        answers: Mode -> its answers; the first is what the others are compared with.
    """
    lines = [
        "| mode | requests | accuracy % | Brier score | calibration error | argmax changes | mean change | largest "
        "change |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    baseline = next(iter(answers.values()))
    for mode, samples in answers.items():
        measures = accuracy(panel, samples.probabilities)
        right = (
            "- | - | -"
            if measures is None
            else f"{measures['accuracy']:.1%} | {measures['brier']:.4f} | {measures['calibration_error']:.4f}"
        ).replace("%", "")
        moved = changes(samples, baseline)
        lines.append(
            f"| `{mode}` | {len(samples.probabilities)} | {right} | {moved['argmax_changes']} "
            f"| {moved['mean_probability_change']:.2g} | {moved['largest_probability_change']:.2g} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jevany_bench.compare", description=__doc__)
    parser.add_argument("model", help="folder of the model repository, with its real weights")
    parser.add_argument("--panel", type=Path, required=True, help="JSON lines; with labels, accuracy is said too")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["default", "engine"], metavar="MODE", help="the first is the base"
    )
    parser.add_argument("--repository", type=Path, default=_ROOT / "model_repository", help="models")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
