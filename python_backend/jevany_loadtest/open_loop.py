"""Load: requests at scheduled instants, whatever the server does, and the highest rate that keeps a given p99."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from jevany_bench.panel import Request
from jevany_loadtest.arrivals import PROBE, WARM_UP, Stage, poisson, stages
from jevany_loadtest.generator_process import GeneratorProcess
from jevany_loadtest.record import Record
from jevany_loadtest.serial import request_bodies

# A search ends when the rate that holds and the one that does not are this close.
_CLOSE = 1.05
_MOST_PROBES = 24
# Fewer samples have no 99th percentile.
_LEAST_SAMPLES = 100


def run(
    record: Record,
    generator: GeneratorProcess,
    plan: Sequence[Stage],
    requests: Sequence[Request],
    *,
    seed: int,
    timeout: float,
    progress: Callable[[float], None],
) -> None:
    """Carry out stages and add them to a result.

    Args:
        record: The result.
        generator: Ready.
        plan: The stages.
        requests: The panel's.
        seed: What arrivals are drawn by.
        timeout: Seconds a request.
        progress: Called with the seconds of the schedule that are over.

    Raises:
        GeneratorError: The load generator has failed; what there is has been recorded.
    """
    content = record.content
    earlier = content["protocol"]["stages"]
    first, begun = len(earlier), sum(stage["seconds"] for stage in earlier)
    workers = max(content["protocol"]["workers"], 1)
    due = Counter(a.stage for w in range(workers) for a in poisson(plan, len(requests), seed, w, workers))
    content["protocol"]["stages"] += [asdict(stage) | {"requests": due[number]} for number, stage in enumerate(plan)]
    message = {
        "url": content["server"]["url"],
        "model": content["model"],
        "timeout": timeout,
        "requests": request_bodies(requests),
        "stages": [asdict(stage) for stage in plan],
        "in_flight": content["protocol"]["in_flight"],
        "seed": seed,
    }
    try:
        for event in generator.run(message):
            record.add({**event, "stage": first + event["stage"], "at": begun + event["at"]})
            progress(event["at"])
    finally:
        record.write()


def search(
    probe: Callable[[Sequence[Stage]], dict[str, Any]], *, rate: float, seconds: float, p99: float
) -> dict[str, Any]:
    """Find the highest rate whose p99, from the scheduled instant, is within a limit, with no error and none dropped.

    Doubles the rate from where it begins until one fails, or halves it until one holds, then closes in on it.

    Args:
        probe: Carries out stages, a warm-up and ``probe`` for each rate, and returns the summary of the last.
        rate: Where to begin, requests a second.
        seconds: Of each rate, and longer where 100 requests take longer.
        p99: The limit, in milliseconds.

    Returns:
        ``p99_limit_ms``, ``highest_rate`` (None where no rate held), and ``probes``, each rate with its p99 and whether
        it held.
    """
    holds: float | None = None
    fails: float | None = None
    probes: list[dict[str, Any]] = []
    while len(probes) < _MOST_PROBES and not (holds and fails and fails / holds <= _CLOSE):
        length = max(seconds, _LEAST_SAMPLES / rate)
        last = probe([*stages([WARM_UP], rate, length), Stage(PROBE, rate, length)])
        value = last["due_ms"].get("p99")
        held = value is not None and value <= p99 and not last["errors"]
        probes.append({"rate": rate, "p99": value, "held": held})
        if held:
            holds = rate
        else:
            fails = rate
        if fails is None:
            rate *= 2
        elif holds is None:
            rate /= 2
            if rate < 0.1:
                break
        else:
            rate = (holds * fails) ** 0.5
    return {"p99_limit_ms": p99, "highest_rate": holds, "probes": probes}
