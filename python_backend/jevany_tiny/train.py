"""Trains the tiny models: `python -m jevany_tiny.train --out DIR`.

Four stages, each of which can run on its own from what the earlier ones left in DIR:

* ``tokenizer``: a byte-level BPE over training text.
* ``base``: the shared text model from scratch: it learns to look things up by reciting, then decides on rows of both
  readouts, from easy to hard.
* ``pointer`` and ``direct-token``: a LoRA adapter on the frozen, bf16-rounded base, with a fresh pointer head or with
  the tied vocabulary head; then the temperature, fitted by likelihood on held-out rows that no evaluation uses.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from jevany_tiny import kernels
from jevany_tiny.batches import READOUTS, Course, Encoders, Feed, Readout, batches_of
from jevany_tiny.checkpoint_files import load_base, save_adapter, save_base, save_head
from jevany_tiny.decisions import DOMAINS, Example, take
from jevany_tiny.learner import DeviceBatch, Learner, PointerHead
from jevany_tiny.shape import LORA_RANK, LORA_TARGETS, new_base
from jevany_tiny.tokenizer import save_tokenizer, train_tokenizer
from jevany_tiny.training_step import TrainingStep

STAGES = ("tokenizer", "base", "pointer", "direct-token")

# Seeds of held-out rows. What is watched during training, what fits the temperature and what `jevany_tiny.evaluate`
# tests are three unrelated streams.
WATCH_SEED = "watch"
CALIBRATION_SEED = "calibration"

# The learning rate holds until this last share of a stage, where it falls to zero: a base that is resumed has lost
# nothing but that share.
_COOLING = 0.3


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda":
        worst = kernels.install(torch.device(options.device))
        print(f"delta rule: largest relative difference from the reference {worst:.1e}", flush=True)
    torch.set_float32_matmul_precision("high")
    stages = STAGES if options.stage == "all" else tuple(options.stage.split(","))
    for stage in stages:
        started = time.monotonic()
        if stage == "tokenizer":
            make_tokenizer(options)
        elif stage == "base":
            train_base(options)
        else:
            train_adapter(options, stage)
        print(f"{stage}: {time.monotonic() - started:.1f} s", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jevany_tiny.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for base/, pointer/ and direct-token/")
    parser.add_argument("--stage", default="all", help=f"all, or some of {','.join(STAGES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=16.0, help="longest time for the base stage")
    parser.add_argument("--adapter-minutes", type=float, default=0.6, help="longest time for each adapter")
    parser.add_argument("--steps", type=int, default=200_000, help="most steps of the base stage")
    parser.add_argument("--adapter-steps", type=int, default=4_000, help="most steps of each adapter")
    parser.add_argument("--batch", type=int, default=512, help="rows in a step")
    parser.add_argument("--primer", type=int, default=700_000, help="rows of the base stage that mostly recite")
    parser.add_argument("--ramp", type=int, default=4_500_000, help="rows of the base stage until the full hardness")
    parser.add_argument("--reciting", type=float, default=0.5, help="share of the rows after the primer that recite")
    parser.add_argument("--rate", type=float, default=2.2e-3, help="peak learning rate of the base")
    parser.add_argument("--adapter-rate", type=float, default=2e-3, help="peak learning rate of the adapters")
    parser.add_argument("--language-weight", type=float, default=0.1, help="weight at first of running text")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 4), help="processes making rows")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch on the CPU; 0 leaves its default")
    parser.add_argument("--held-out", type=int, default=4096, help="held-out rows for watching and for calibration")
    parser.add_argument("--base-name", default="jevany-tiny-base", help="how checkpoints name the base")
    parser.add_argument("--resume", action="store_true", help="start the base from where the last run left it")
    parser.add_argument("--smoke", action="store_true", help="five steps of a few rows through every stage, on the CPU")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.device, options.steps, options.adapter_steps = "cpu", 5, 5
        options.batch, options.held_out, options.workers = 8, 64, min(options.workers, 1)
    return options


def make_tokenizer(options: argparse.Namespace) -> None:
    """Trains the tokenizer and writes it into every folder of the result."""
    tokenizer = train_tokenizer(options.seed, 1_000 if options.smoke else 60_000)
    for folder in ("base", *READOUTS):
        save_tokenizer(tokenizer, options.out / folder)


def train_base(options: argparse.Namespace) -> None:
    """Trains the base from scratch with a pointer head that is then thrown away."""
    device = torch.device(options.device)
    encoders = Encoders(options.out / "base")
    seed = f"base/{options.seed}/resumed" if options.resume else f"base/{options.seed}"
    course = Course(reciting=options.reciting)
    if not options.resume:
        course = Course(options.primer, options.ramp, options.reciting)
    feed = Feed(options.out / "base", READOUTS, seed, options.batch, options.workers, course)
    base = new_base(encoders.size, encoders.pad)
    learner = Learner(base, PointerHead(base.config.hidden_size), base.embed_tokens, encoders.label_ids).to(device)
    progress_file = options.out / "base-progress.pt"
    if options.resume:
        learner.load_state_dict(torch.load(progress_file, map_location=device, weights_only=True))
    count = sum(parameter.numel() for parameter in base.parameters())
    print(f"base: {count / 1e6:.2f} M parameters, {options.workers} workers, batches of {options.batch}", flush=True)
    _fit(
        learner,
        feed,
        options,
        steps=options.steps,
        minutes=options.minutes,
        rate=options.rate,
        from_scratch=True,
    )
    feed.close()
    torch.save(learner.state_dict(), progress_file)
    save_base(base, options.out / "base")


def train_adapter(options: argparse.Namespace, readout: str) -> None:
    """Trains one adapter on the frozen base, fits its temperature and writes the checkpoint."""
    if readout not in READOUTS:
        raise SystemExit(f"--stage: {readout!r} is none of {', '.join(STAGES)}")
    from peft import LoraConfig, get_peft_model

    device = torch.device(options.device)
    encoders = Encoders(options.out / "base")
    feed = Feed(options.out / "base", (readout,), f"{readout}/{options.seed}", options.batch, options.workers, Course())
    base = new_base(encoders.size, encoders.pad)
    load_base(base, options.out / "base")
    base.requires_grad_(False)
    embedding = base.embed_tokens
    base.name_or_path = options.base_name
    config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=list(LORA_TARGETS), bias="none")
    adapted = get_peft_model(base, config)
    head = PointerHead(base.config.hidden_size) if readout == "pointer" else None
    learner = Learner(adapted, head, embedding, encoders.label_ids).to(device)
    steps, seconds = _fit(
        learner,
        feed,
        options,
        steps=options.adapter_steps,
        minutes=options.adapter_minutes,
        rate=options.adapter_rate,
        from_scratch=False,
        watched=(readout,),
    )
    feed.close()
    calibration = take("heldout", CALIBRATION_SEED, options.held_out)
    logits, labels = _collect(learner, calibration, encoders, readout, options)
    temperature = fit_temperature(logits, labels)
    print(f"{readout}: temperature {temperature:.3f}", flush=True)
    folder = options.out / readout
    save_adapter(adapted, folder)
    provenance = {
        "seed": options.seed,
        "steps": steps,
        "rows": steps * options.batch,
        "seconds": round(seconds, 1),
        "calibration_rows": len(calibration),
    }
    save_head(
        folder,
        base=options.base_name,
        readout=readout,
        head=None if head is None else head.state_dict(),
        labels=encoders.labels,
        temperature=temperature,
        provenance=provenance,
    )


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the temperature, between 1/5 and 5, at which the labels are likeliest."""
    candidates = torch.exp(torch.linspace(-math.log(5), math.log(5), 401))
    losses = [functional.cross_entropy(logits / candidate, labels).item() for candidate in candidates]
    return round(float(candidates[min(range(len(losses)), key=losses.__getitem__)]), 4)


def _autocast(options: argparse.Namespace) -> Any:
    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.device == "cuda")


def _fit(
    learner: Learner,
    feed: Feed,
    options: argparse.Namespace,
    *,
    steps: int,
    minutes: float,
    rate: float,
    from_scratch: bool,
    watched: Sequence[Readout] = READOUTS,
) -> tuple[int, float]:
    """Trains until the steps or the minutes are used up; the learning rate follows whichever is further along.

    Args:
        learner: What is trained.
        feed: The rows.
        options: The command line.
        steps: At most so many.
        minutes: At most so long.
        rate: Peak learning rate.
        from_scratch: As `TrainingStep` takes it.
        watched: Which readouts are measured on held-out rows.

    Returns:
        The number of steps and the seconds they took.
    """
    step = TrainingStep(learner, rate, from_scratch=from_scratch)
    warmup = min(200, steps // 10 + 1)
    encoders = Encoders(options.out / "base")
    watch = take("heldout", WATCH_SEED, min(options.held_out, 2048))
    started = reported = time.monotonic()
    done = rows = last_rows = 0
    learner.train()
    while True:
        progress = max(done / steps, (time.monotonic() - started) / (60 * minutes))
        if progress >= 1:
            break
        factor = min(1.0, (done + 1) / warmup) * min(1.0, (1 - progress) / _COOLING)
        batch = next(feed)
        step(batch, factor, options.language_weight * max(0.1, 1 - 1.5 * progress))
        done += 1
        rows += len(batch.labels)
        if time.monotonic() - reported >= 10 or done in (1, 50):
            report = step.report()
            previous, reported = reported, time.monotonic()
            print(
                f"step {done:6d}  {reported - started:6.1f} s  "
                f"{(rows - last_rows) / (reported - previous):8.0f} rows/s  {report}  rate {rate * factor:.2e}",
                flush=True,
            )
            last_rows = rows
        if done % 5000 == 0:
            _report_held_out(learner, watch, encoders, watched, options)
    seconds = time.monotonic() - started
    _report_held_out(learner, watch, encoders, watched, options)
    return done, seconds


def _collect(
    learner: Learner, examples: Sequence[Example], encoders: Encoders, readout: Readout, options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of some decisions, minus infinity where there is no option, and their labels."""
    device = torch.device(options.device)
    widest = max(example.option_count for example in examples)
    parts, labels = [], []
    learner.eval()
    # Compiling the layers once more, for a few batches without gradients, would take longer than these do.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for raw in batches_of(examples, encoders, readout, min(512, 4 * options.batch)):
            batch = DeviceBatch.of(raw, device)
            with _autocast(options):
                hidden = learner.hidden_states(batch.ids)
            logits = learner.logits(hidden, batch).cpu()
            parts.append(functional.pad(logits, (0, widest - logits.shape[1]), value=float("-inf")))
            labels.append(batch.labels.cpu())
    learner.train()
    return torch.cat(parts), torch.cat(labels)


def _report_held_out(
    learner: Learner,
    examples: Sequence[Example],
    encoders: Encoders,
    readouts: Sequence[Readout],
    options: argparse.Namespace,
) -> None:
    for readout in readouts:
        logits, labels = _collect(learner, examples, encoders, readout, options)
        right = (logits.argmax(-1) == labels).tolist()
        print(f"  held out, {readout}: {sum(right) / len(right):.3f}  {_by_group(examples, right)}", flush=True)


def _by_group(examples: Sequence[Example], right: Sequence[bool]) -> str:
    outcomes: dict[str, list[bool]] = {name: [] for name in (*DOMAINS, "noul", "choice", "score")}
    for example, value in zip(examples, right, strict=True):
        outcomes[example.domain].append(value)
        outcomes[example.question["type"]].append(value)
    return "  ".join(f"{name} {sum(values) / max(1, len(values)):.3f}" for name, values in outcomes.items())


if __name__ == "__main__":
    main()
