"""Where Triton is: in NVIDIA's container image or the ``nvidia-pytriton`` wheel; laid out as the server wants it."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Where NVIDIA's container images have their Triton.
IMAGE_DIRECTORY = Path("/opt/tritonserver")
STUB_NAME = "triton_python_backend_stub"


class ServerError(Exception):
    """The server cannot be started or has stopped; the message says why in one line."""


@dataclass(frozen=True)
class Installation:
    """A Triton Server on this machine.

    Attributes:
        binary: The ``tritonserver`` executable.
        python_backend: The directory with the Python backend's library.
        stub: The backend's stub for the running Python version.
        libraries: Directories for ``LD_LIBRARY_PATH``.
    """

    binary: Path
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...]

    def lay_out(self, directory: Path) -> Path:
        """Build the backend directory in ``directory``, by links, and return it for ``--backend-directory``."""
        python = directory / "backends" / "python"
        python.mkdir(parents=True)
        for file in self.python_backend.iterdir():
            if file.name != STUB_NAME:
                (python / file.name).symlink_to(file)
        (python / STUB_NAME).symlink_to(self.stub)
        return python.parent

    def environment(self) -> dict[str, str]:
        """Return the environment in which the server and its Python models run."""
        # The stub embeds an interpreter that ignores PYTHONPATH and takes the packages of the python3 it finds on
        # the PATH: that must be the one that runs here, or the models would see another environment.
        return os.environ | {
            "LD_LIBRARY_PATH": _joined(*map(str, self.libraries), os.environ.get("LD_LIBRARY_PATH", "")),
            "PATH": _joined(str(Path(sys.executable).parent), os.environ.get("PATH", "")),
            "PYTHONNOUSERSITE": "1",
            # Idle threads of a CPU model sleep. By default they spin, and beside any other busy process on the same
            # cores each small operation then waits for a thread that is not scheduled: seconds instead of milliseconds.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }


def _joined(*paths: str) -> str:
    return os.pathsep.join(filter(None, paths))


def find_installation(image_directory: Path = IMAGE_DIRECTORY) -> Installation:
    """Find a Triton whose Python backend is for the running Python: the container image's, or else the wheel's.

    Args:
        image_directory: Where a container image has its Triton.

    Raises:
        ServerError: There is none; or, of the wheel: it has no stub for this Python, or Python has no shared library.
    """
    backend = image_directory / "backends" / "python"
    needed = _python_of(backend / STUB_NAME)
    if needed == _running_python():
        # The image's own linker configuration and LD_LIBRARY_PATH lead to every library.
        return Installation(image_directory / "bin" / "tritonserver", backend, backend / STUB_NAME, libraries=())
    try:
        root = Path(str(metadata.distribution("nvidia-pytriton").locate_file(""))).resolve()
    except metadata.PackageNotFoundError:
        if needed is not None:
            raise ServerError(
                f"the Triton in {image_directory} runs Python {needed} models, and this is Python {_running_python()}"
            ) from None
        raise ServerError("no Triton Server here: pip install 'jevany-triton[server]'") from None
    return _installation_of_wheel(root)


def _installation_of_wheel(root: Path) -> Installation:
    triton = root / "pytriton" / "tritonserver"
    version = _running_python()
    stub = triton / "python_backend_stubs" / version / STUB_NAME
    binary = triton / "bin" / "tritonserver"
    if not binary.is_file():
        raise ServerError(f"no tritonserver at {binary}: this wheel brings one for Linux on x86-64 only")
    if not stub.is_file():
        raise ServerError(f"this Triton has no Python backend for Python {version}; use 3.11 or 3.12")
    return Installation(
        binary=binary,
        python_backend=triton / "backends" / "python",
        stub=stub,
        libraries=(root / "nvidia_pytriton.libs", _libpython_directory(version)),
    )


def _running_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _python_of(stub: Path) -> str | None:
    """Return the version of Python that a stub embeds, which is the one library it names; None without a stub."""
    try:
        name = re.search(rb"libpython(\d+\.\d+)", stub.read_bytes())
    except OSError:
        return None
    return name and name[1].decode()


def _libpython_directory(version: str) -> Path:
    name = f"libpython{version}.so.1.0"
    places = [Path(p) for p in (sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib") if p]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        places.append(Path("/usr/lib") / multiarch)
    for place in places:
        if (place / name).exists():
            return place
    raise ServerError(
        f"{name} is not in {places[0]}: Triton's Python backend needs Python's shared library "
        f"(on Debian and Ubuntu: apt install libpython{version})"
    )
