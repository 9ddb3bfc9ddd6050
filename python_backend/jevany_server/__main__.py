"""``python -m jevany_server``: serve models of a repository until interrupted, or until one of them breaks.

Exit code: 0 after Ctrl-C, SIGTERM, SIGHUP or SIGQUIT, 1 if a model does not load or stops working, 2 for a wrong
command line.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from jevany_server.installation import ServerError
from jevany_server.process import Ports, TritonServer, end_on_signals
from jevany_server.ready import port_number

LOAD_SECONDS = 1800


def main() -> int:
    """Run the command line; the exit code is 0 after an ordinary stop."""
    options = _parse_arguments()
    end_on_signals()
    started = time.monotonic()
    try:
        with TritonServer(
            options.repository,
            options.model,
            host=options.host,
            ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
            weights=options.weights,
        ) as server:
            server.wait_until_ready(LOAD_SECONDS)
            _say(f"ready after {time.monotonic() - started:.1f} s: {', '.join(map(server.log_name, server.models))}")
            _say(f"gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.host}:{server.ports.metrics}")
            _say("Ctrl-C stops the server")
            try:
                server.watch()
            except ServerError as error:
                _say(str(error))  # Now, not after the seconds that stopping can take.
                return 1
    except ServerError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("stopped")
        return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jevany_server",
        description="Serve decision models in a real Triton Inference Server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", nargs="+", help="model of the repository to serve")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="directory with the models")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--http-port", type=port_number, default=8000, help="port for HTTP; 0 takes a free one")
    parser.add_argument("--grpc-port", type=port_number, default=8001, help="port for gRPC; 0 takes a free one")
    parser.add_argument("--metrics-port", type=port_number, default=8002, help="port for metrics; 0 takes a free one")
    parser.add_argument(
        "--weights",
        choices=("random", "checkpoint"),
        help="in the place of what config.pbtxt says; random ones of a release's shape are for measuring latency: "
        "their answers mean nothing",
    )
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"jevany_server: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
