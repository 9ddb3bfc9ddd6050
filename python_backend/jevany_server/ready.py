"""``python -m jevany_server.ready``: do the models answer? The health check of a container.

Asks for each model's own readiness. The server's, ``/v2/health/ready``, says too little: before Triton 26.04 it stays
positive when the process of a model has died.
"""

from __future__ import annotations

import argparse
import http.client
import sys


def is_ready(host: str, http_port: int, model: str, timeout: float = 5) -> bool:
    """Return whether a model answers.

    Args:
        host: Where its server is.
        http_port: The server's port for HTTP.
        model: The model's name.
        timeout: Seconds after which it does not.
    """
    connection = http.client.HTTPConnection(host, http_port, timeout=timeout)
    try:
        connection.request("GET", f"/v2/models/{model}/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def port_number(text: str) -> int:
    """Return the number of a port that a command line names.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def main() -> int:
    """Run the command line; the exit code is 0 if every model answers and 1 if one does not."""
    parser = argparse.ArgumentParser(
        prog="jevany_server.ready", description="Say whether models answer. Exit code: 0 if all do, 1 if one does not."
    )
    parser.add_argument("model", nargs="+", help="model that has to answer")
    parser.add_argument("--host", default="127.0.0.1", help="address of the server (default: %(default)s)")
    parser.add_argument("--http-port", type=port_number, default=8000, help="its port for HTTP (default: %(default)s)")
    options = parser.parse_args()
    for model in options.model:
        if not is_ready(options.host, options.http_port, model):
            print(f"{model} is not ready")
            return 1
    print("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
