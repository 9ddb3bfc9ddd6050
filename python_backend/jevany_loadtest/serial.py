"""Serial latency: one user, a closed loop, the panel in three shuffled orders."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jevany_backend.protocol import question_to_json
from jevany_bench.panel import Request
from jevany_bench.protocol import orders
from jevany_loadtest.generator_process import GeneratorProcess
from jevany_loadtest.record import Record
from jevany_loadtest.server import Server


def request_bodies(requests: Sequence[Request]) -> list[str]:
    """Return the JSON that is sent for each request."""
    return [
        json.dumps({"state": r.state, "question": question_to_json(r.question)}, ensure_ascii=False) for r in requests
    ]


def run(
    record: Record, server: Server, requests: Sequence[Request], *, timeout: float, progress: Callable[[int], None]
) -> None:
    """Carry out a serial run, or what is left of it.

    Args:
        record: Its result; ``protocol`` says how many repeats and warm-up requests.
        server: The server.
        requests: The panel's.
        timeout: Seconds a request.
        progress: Called with the number of samples after each.

    Raises:
        GeneratorError: The load generator has failed; what there is has been recorded.
    """
    content = record.content
    protocol, model = content["protocol"], content["model"]
    plan = {
        "url": content["server"]["url"],
        "model": model,
        "timeout": timeout,
        "requests": request_bodies(requests),
        "warm_up": [row % len(requests) for row in range(protocol["warm_up"])],
        "order": orders(len(requests), protocol["repeats"])[record.position :],
    }
    begun = max(content["samples"]["at"], default=0.0)
    before = server.counters(model)
    tokens = 0
    try:
        with GeneratorProcess("serial") as generator:
            for event in generator.run(plan):
                if event["event"] == "warm":
                    before, tokens = server.counters(model, before, tokens), 0
                    generator.go_on()
                    continue
                tokens += event["tokens"] or 0
                if not event.get("warm_up"):
                    record.add({**event, "at": begun + event["at"]})
                    progress(record.position)
        content["complete"] = True
    finally:
        content["counters"] = _added(content["counters"], server.counters(model, before, tokens).since(before))
        record.write()


def _added(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Add up the counters of the parts of a run that was resumed."""
    if one is None or other is None:
        return one or other
    return {name: None if value is None or one[name] is None else value + one[name] for name, value in other.items()}
