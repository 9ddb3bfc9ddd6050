"""The server under test: the one that runs, or one of our own for as long as the test takes."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from jevany_backend.engine.measured import package_version
from jevany_bench import machine
from jevany_server.installation import IMAGE_DIRECTORY, ServerError, find_installation
from jevany_server.process import Ports, TritonServer
from jevany_server.ready import is_ready

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_COUNTERS = {
    "replays": "jevany_graph_replays_total",
    "eager_calls": "jevany_eager_calls_total",
    "padding_tokens": "jevany_padding_tokens_total",
    "captures_after_ready": "jevany_captures_after_ready_total",
}
_TOKENS = "jevany_tokens_total"
_SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        host: Where.
        ports: Its ports.
        started_here: Whether it runs for this test only.
    """

    host: str
    ports: Ports
    started_here: bool

    def url(self, protocol: str) -> str:
        """Return its URL in ``grpc`` or ``http``."""
        return f"{protocol}://{self.host}:{self.ports.grpc if protocol == 'grpc' else self.ports.http}"

    def describe(self, model: str, protocol: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the result's entries ``server`` and ``machine``.

        Raises:
            ServerError: It does not say over gRPC.
        """
        triton: Any = tritonclient.grpc.InferenceServerClient(f"{self.host}:{self.ports.grpc}")
        try:
            version = triton.get_server_metadata(as_json=True)["version"]
            groups = triton.get_model_config(model, as_json=True)["config"]["instance_group"]
        except InferenceServerException as error:
            raise ServerError(f"{model} on {self.host}:{self.ports.grpc}: {error.message()}") from None
        finally:
            triton.close()
        here = self.host in LOOPBACK
        host: dict[str, Any] = machine.describe_host() if here else dict.fromkeys(machine.describe_host())
        device = None
        if here and all(group["kind"] == "KIND_CPU" for group in groups):
            device = host["processor"]
        elif here and host["gpus"]:
            gpu = host["gpus"][int(groups[0].get("gpus", [0])[0])]
            # The driver gives a slice the name of the whole GPU.
            device = gpu["name"] + (" (MIG)" if gpu["mig.mode.current"] == "Enabled" else "")
        if not here:
            host |= {"gpus": [], "packages": {}}
        info = self.metrics(model).get("jevany_model_info")
        entry = {
            "url": self.url(protocol),
            "triton": version,
            # Only of a server that was started here it is known: what answers at an address may be a container.
            "origin": _origin() if self.started_here else "not known",
            "engine": info and info[0].get("engine"),
        }
        return entry, {"device": device, **host}

    def metrics(self, model: str) -> dict[str, tuple[dict[str, str], float]]:
        """Return a model's own metrics by name, each with its labels and its value, summed over instances.

        Empty where the endpoint cannot be reached.
        """
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.ports.metrics}/metrics", timeout=10) as response:
                text = response.read().decode()
        except (OSError, urllib.error.URLError):
            return {}
        found: dict[str, tuple[dict[str, str], float]] = {}
        for name, labels, value in re.findall(r"^(jevany_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if named["model"] == model:
                found[name] = named, float(value) + (found[name][1] if name in found else 0)
        return found

    def counters(self, model: str, after: Counters | None = None, tokens: int = 0) -> Counters:
        """Read what the model's graphs have done.

        The server brings its counters up to date once a second, so this waits until they hold all that was asked.

        Args:
            model: The model.
            after: An earlier reading.
            tokens: The tokens that were asked since.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            metrics = self.metrics(model)
            read = Counters(
                {name: int(metrics[metric][1]) if metric in metrics else None for name, metric in _COUNTERS.items()},
                metrics[_TOKENS][1] if _TOKENS in metrics else None,
            )
            known = None if after is None else after.tokens
            if known is None or read.tokens is None or read.tokens >= known + tokens or time.monotonic() > deadline:
                return read
            time.sleep(0.1)


def _origin() -> str:
    if find_installation().binary.is_relative_to(IMAGE_DIRECTORY):
        return machine.container_image() or f"Triton in {IMAGE_DIRECTORY}"
    return f"nvidia-pytriton {package_version('nvidia-pytriton')}"


@dataclass(frozen=True)
class Counters:
    """What a model's graphs have done so far; None where the server does not count it."""

    values: dict[str, int | None]
    tokens: float | None

    def since(self, before: Counters) -> dict[str, int | None] | None:
        """Return the difference to an earlier reading, None where nothing is counted."""
        difference: dict[str, int | None] = {}
        for name, value in self.values.items():
            first = before.values[name]
            difference[name] = None if value is None or first is None else value - first
        return difference if any(value is not None for value in difference.values()) else None


@contextlib.contextmanager
def served(
    repository: Path, model: str, host: str, ports: Ports, *, weights: str | None, log: Path, load_seconds: float
) -> Iterator[Server]:
    """Yield the server that serves a model at an address; where none listens, one that is started and stopped here.

    Args:
        repository: Where the model is, if a server has to be started.
        model: Its name.
        host: Where to look, and listen.
        ports: Likewise.
        weights: ``random`` or ``checkpoint`` for a server that is started, in the place of what ``config.pbtxt`` says.
        log: Where the log of such a server goes.
        load_seconds: How long such a server may take to load.

    Raises:
        ServerError: There is a server without the model, or none can be started.
    """
    if is_ready(host, ports.http, model):
        yield Server(host, ports, started_here=False)
        return
    if host not in LOOPBACK:
        raise ServerError(f"{model} is not ready at {host}:{ports.http}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as stream,
        TritonServer(repository, [model], host=host, ports=ports, log=stream, weights=weights) as triton,
    ):
        triton.wait_until_ready(load_seconds)
        yield Server(host, triton.ports, started_here=True)
