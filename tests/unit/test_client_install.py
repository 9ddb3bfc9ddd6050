"""The client runs without what the server's code needs: PyTorch and what belongs to it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.requirements import Requirement

_SCRIPT = """
import sys
import jevany_client.command_line, jevany_client.transport_grpc, jevany_client.transport_http
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_client_loads_nothing_of_the_server() -> None:
    asked = [Requirement(text) for text in importlib.metadata.requires("jevany-triton") or []]
    backend = {
        requirement.name
        for requirement in asked
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "backend"})
    }
    assert {"torch", "transformers"} <= backend
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "tritonclient" in loaded
    assert not backend & loaded
