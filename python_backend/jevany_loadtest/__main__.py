"""``python -m jevany_loadtest``: measure a model behind a real server, and hold it against the targets.

Exit code: 0 if no target was missed, 1 if one was or the run failed, 2 for a wrong command line, 130 after Ctrl-C;
then what there is lies in the file, and ``--resume`` goes on with it: after the last sample, in the open mode after the
last whole stage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jevany_bench.panel import Panel, Request, read_panel
from jevany_bench.progress import Progress
from jevany_bench.protocol import REPEATS, SEED, WARM_UP
from jevany_bench.result import ResultError
from jevany_loadtest import open_loop, serial, tables
from jevany_loadtest.arrivals import SHAPES, Stage, stages
from jevany_loadtest.connection import Connection
from jevany_loadtest.generator_process import GeneratorError, GeneratorProcess
from jevany_loadtest.random_text import in_random_text
from jevany_loadtest.record import Record
from jevany_loadtest.serial import request_bodies
from jevany_loadtest.server import LOOPBACK, Server, served
from jevany_loadtest.targets import TARGETS, compare, good, read_targets
from jevany_server.__main__ import LOAD_SECONDS
from jevany_server.installation import ServerError
from jevany_server.process import Ports, end_on_signals
from jevany_server.ready import port_number

ROOT = Path(__file__).parents[2]
PANELS = {
    "jevbench-shape": ROOT / "loadtest" / "panels" / "jevbench-shape-231.jsonl",
    "transfer-shape": ROOT / "loadtest" / "panels" / "transfer-shape-44.jsonl",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.mode == "open" and options.rate is None:
        print("loadtest: --mode open needs --rate, in requests a second", file=sys.stderr)
        return 2
    for name in ("rate", "search_p99", "workers", "remote_workers"):
        if getattr(options, name) and options.mode != "open":
            print(f"loadtest: --{name.replace('_', '-')} is for --mode open", file=sys.stderr)
            return 2
    if options.remote_workers and options.host in LOOPBACK:
        print(
            f"loadtest: --remote-workers needs --host, the server's address on the network: "
            f"{options.host} is another machine for each of them",
            file=sys.stderr,
        )
        return 2
    end_on_signals()
    try:
        panel = read_panel(PANELS.get(options.panel) or Path(options.panel))
        targets = read_targets(TARGETS)
    except (OSError, ValueError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    name = f"{options.model}-{options.mode}-{Path(panel.name).stem}-{options.transport}"
    path = options.out / f"{name}.json"
    try:
        with served(
            options.repository,
            options.model,
            options.host,
            Ports(options.http_port, options.grpc_port, options.metrics_port),
            weights=options.weights,
            log=options.out / "server.log",
            load_seconds=LOAD_SECONDS,
        ) as server:
            how = "started for this run" if server.started_here else "already running"
            print(f"loadtest: server {how}: {server.url(options.transport)}", file=sys.stderr, flush=True)
            run = _serial if options.mode == "serial" else _open
            requests = _requests(options, server, replace(panel, requests=panel.requests[: options.rows]))
            content = run(options, server, panel, requests, path)
    except (ServerError, GeneratorError, ResultError, ValueError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nloadtest: stopped; {path} has what there is, if anything", file=sys.stderr)
        return 130
    if options.mode == "serial":
        content.content["comparison"] = compare(content.content, targets)
        content.write()
    _show(content.content)
    print(f"\n{path}: written", flush=True)
    return 0 if passed(content.content) else 1


def passed(content: dict[str, Any]) -> bool:
    """Return whether a run ended well: no request failed and no target was missed; for a search, whether it found.

    Args:
        content: The result.
    """
    if found := content.get("search"):
        # It goes beyond what the server can do on purpose, so what is dropped there is no fault.
        return found["highest_rate"] is not None
    return good(content["comparison"]) and not content["errors"]


def _requests(options: argparse.Namespace, server: Server, panel: Panel) -> list[Request]:
    """Return what is asked: the panel's requests, or for random weights others of their lengths."""
    info = server.metrics(options.model).get("jevany_model_info")
    if info is None or info[0].get("weights") != "random":
        return panel.requests
    print("loadtest: random weights: random text in the lengths of the panel's rows", file=sys.stderr, flush=True)
    connection = Connection(server.url(options.transport), options.model, options.timeout)
    try:
        return in_random_text(panel, lambda request: connection.ask(request_bodies([request])[0].encode()))
    finally:
        connection.close()


def _serial(
    options: argparse.Namespace, server: Server, panel: Panel, requests: Sequence[Request], path: Path
) -> Record:
    protocol = {"transport": options.transport, "repeats": options.repeats, "warm_up": options.warm_up, "seed": SEED}
    record = Record("serial", options.model, panel, len(requests), protocol, server, path)
    if options.resume and record.resume():
        print(f"loadtest: resumed after {record.position} samples", file=sys.stderr)
    bar = Progress(f"{options.model} {options.transport}: samples", len(requests) * options.repeats)
    try:
        serial.run(record, server, requests, timeout=options.timeout, progress=bar.to)
    finally:
        bar.end()
    return record


def _open(options: argparse.Namespace, server: Server, panel: Panel, requests: Sequence[Request], path: Path) -> Record:
    protocol = {
        "transport": options.transport,
        "rate": options.rate,
        "seed": SEED,
        "in_flight": options.in_flight,
        "workers": options.workers + options.remote_workers,
        "seconds": options.seconds,
        "shapes": None if options.search_p99 else options.stages,
        "search_p99": options.search_p99,
        "stages": [],
    }
    record = Record("open", options.model, panel, len(requests), protocol, server, path)
    resumed = options.resume and record.resume()
    if resumed:
        print(f"loadtest: resumed after {len(record.content['protocol']['stages'])} stages", file=sys.stderr)
    before = server.counters(options.model)
    planned = 0
    with GeneratorProcess(
        "open",
        local_workers=options.workers,
        remote_workers=options.remote_workers,
        master_port=options.master_port,
    ) as generator:

        def carry_out(plan: Sequence[Stage]) -> dict[str, Any]:
            nonlocal planned
            # The stages that are recorded already are the first of a run that is resumed.
            known = max(len(record.content["protocol"]["stages"]) - planned, 0)
            planned += len(plan)
            if left := plan[known:]:
                make_load(left)
            stage: dict[str, Any] = record.content["summary"]["stages"][planned - 1]
            return stage

        def make_load(plan: Sequence[Stage]) -> None:
            label = f"{options.model} at {max(stage.rate for stage in plan):.4g}/s: seconds"
            bar = Progress(label, math.ceil(sum(stage.seconds for stage in plan)))
            # Another seed for each part: the same arrivals again would be the same accidents again.
            seed = SEED + len(record.content["protocol"]["stages"])
            try:
                open_loop.run(
                    record,
                    generator,
                    plan,
                    requests,
                    seed=seed,
                    timeout=options.timeout,
                    progress=lambda at: bar.to(math.ceil(at)),
                )
            finally:
                bar.end()

        if options.search_p99:
            found = open_loop.search(carry_out, rate=options.rate, seconds=options.seconds, p99=options.search_p99)
        else:
            carry_out(stages(options.stages, options.rate, options.seconds))
            found = None
    content = record.content
    if found:
        content["search"] = found
    if not resumed:  # What the graphs did in the part before is not known.
        asked = sum(tokens or 0 for tokens in content["samples"]["tokens"])
        content["counters"] = server.counters(options.model, before, asked).since(before)
    content["complete"] = True
    record.write()
    return record


def _show(content: dict[str, Any]) -> None:
    parts = [tables.title(content), tables.times_table(content["summary"])]
    if content["kind"] == "open":
        parts.append(tables.stages_table(content))
    parts.append(tables.facts(content))
    if content["kind"] == "serial":
        parts.append(tables.comparison_table(content))
    if found := content.get("search"):
        rate = "no rate" if found["highest_rate"] is None else f"{found['highest_rate']:.2f} requests a second"
        parts.append(f"Highest rate with p99 within {found['p99_limit_ms']:g} ms: {rate}")
    print("\n" + "\n\n".join(parts), flush=True)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _panel(text: str) -> str:
    if text not in PANELS and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file and none of {', '.join(PANELS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jevany_loadtest", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="model to measure")
    parser.add_argument("--mode", choices=("serial", "open"), default="serial", help="one user, or scheduled arrivals")
    parser.add_argument("--panel", type=_panel, default="jevbench-shape", help=f"{', '.join(PANELS)} or FILE.jsonl")
    parser.add_argument("--rows", type=_count, help="take only so many requests of the panel, from its start")
    parser.add_argument("--transport", choices=("grpc", "http"), default="grpc", help="protocol")
    parser.add_argument("--timeout", type=_positive, default=60.0, help="seconds after which a request has failed")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "loadtest", help="folder of the result files")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut short")
    group = parser.add_argument_group("serial")
    group.add_argument("--repeats", type=_count, default=REPEATS, help="how often each request is asked")
    group.add_argument("--warm-up", type=_count, default=WARM_UP, help="requests that come first and do not count")
    group = parser.add_argument_group("open")
    group.add_argument("--rate", type=_positive, help="requests a second; where a search begins")
    group.add_argument(
        "--seconds", type=_positive, default=30.0, help="length of the load, or of each rate of a search"
    )
    group.add_argument(
        "--stages", nargs="+", choices=SHAPES, default=["warm-up", "soak"], help="what happens, in order"
    )
    group.add_argument("--in-flight", type=_count, default=256, help="requests at a time; what is beyond is dropped")
    group.add_argument("--search-p99", type=_positive, metavar="MS", help="find the highest rate with this p99")
    group.add_argument("--workers", type=int, default=0, help="processes that make the load; 0: this one's child")
    group.add_argument("--remote-workers", type=int, default=0, help="workers to wait for, from other machines")
    group.add_argument("--master-port", type=port_number, default=5557, help="where workers find the master")
    group = parser.add_argument_group("server; one is started here if none listens")
    group.add_argument("--host", default="127.0.0.1", help="its address")
    group.add_argument("--http-port", type=port_number, default=8000, help="its port for HTTP")
    group.add_argument("--grpc-port", type=port_number, default=8001, help="its port for gRPC")
    group.add_argument("--metrics-port", type=port_number, default=8002, help="its port for metrics")
    group.add_argument("--repository", type=Path, default=ROOT / "model_repository", help="models to start it with")
    group.add_argument(
        "--weights", choices=("random", "checkpoint"), help="start it with these in the place of what config.pbtxt says"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
