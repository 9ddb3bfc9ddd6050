"""``make demo``: serve jevany-tiny, ask it one question of each type, stop it again."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from rich.console import Console

from jevany_backend.protocol import JSON
from jevany_client import Choice, Client, Noul, Question, Score
from jevany_client.display import print_reply
from jevany_server.installation import ServerError
from jevany_server.process import Ports, TritonServer, end_on_signals

MODEL = "jevany-tiny"
REPOSITORY = Path("model_repository")
LOAD_SECONDS = 120

STATE: JSON = {
    "from": "dana@example.com",
    "plan": "business",
    "message": "We were charged twice for the October invoice. Please refund one of the payments today.",
}
QUESTIONS: dict[str, Question] = {
    "team": Choice(
        "Which team should handle this message?",
        {
            "billing": "Charges, payments, refunds and invoices",
            "shipping": "Delivery, tracking and parcels",
            "technical": "Errors, crashes and outages",
        },
    ),
    "refund": Noul("Is the customer asking for a refund?"),
    "urgency": Score("How urgent is this message?", ["can wait", "within a week", "today"]),
}


def main() -> int:
    """Run the demonstration; the exit code is 0 when every question was answered."""
    argparse.ArgumentParser(prog="jevany_server.demo", description=__doc__).parse_args()
    end_on_signals()
    console = Console(highlight=False)
    with tempfile.TemporaryFile() as log:
        try:
            _run(console, log)
        except ServerError as error:
            log.seek(0)
            sys.stderr.buffer.write(log.read())
            print(f"demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("demo: stopped", file=sys.stderr)
            return 130
    return 0


def _run(console: Console, log: IO[bytes]) -> None:
    started = time.monotonic()
    console.print(f"Starting a Triton Inference Server with {MODEL} on this machine's CPU ...")
    with TritonServer(REPOSITORY, [MODEL], ports=Ports(0, 0, 0), log=log) as server:
        server.wait_until_ready(LOAD_SECONDS)
        console.print(f"Ready after {time.monotonic() - started:.1f} s. The state:\n")
        console.print(json.dumps(STATE, indent=2), markup=False)
        console.print("\nThree questions about it, and the probability of every answer:\n")
        with Client(server.grpc_url, MODEL) as client:
            print_reply(console, client.decide_all(STATE, QUESTIONS))
    console.print("\nThe server is stopped. To go on:\n")
    console.print("  make serve                                  keep a server running")
    console.print('  .venv/bin/jevany decide --state "..." --noul "..."   ask it from another terminal')
    console.print("  .venv/bin/jevany decide --help              everything else that can be asked")


if __name__ == "__main__":
    sys.exit(main())
