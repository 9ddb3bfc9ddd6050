"""``python -m tests.docker_steps``: every RUN of docker/Dockerfile in a clean root, where there is no Docker engine.

It takes root's rights, debootstrap and a Python of the image's version, and some 20 GB of disk while it runs. The root
is Debian's, made anew; in the place of NVIDIA's base image it gets that Python and the Triton of the wheel. Stages are
layers of an overlay, as an engine has them, so each step sees the files that it would see there. At the end the cpu
image's own command serves its model as its own user. ``docker/steps.json`` tells what was run and what was not;
tests/unit/test_docker.py fails when the Dockerfile or a lock has changed since.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jevany_server.installation import IMAGE_DIRECTORY, STUB_NAME, find_installation
from tests.docker_files import ROOT, Stage, read_dockerfile

RECORD = ROOT / "docker" / "steps.json"
LOCKS = ("requirements", "kernels", "compiled", "build")
PYTHON_VERSION = "3.12"
_SUITE = "trixie"  # With a glibc no older than Ubuntu 24.04's, for which the locks are.
# What a Python that was built elsewhere is linked to, and the certificates of package servers.
_PACKAGES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8t64,libsqlite3-0,libssl3t64,zlib1g"
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_STEP_SECONDS = 3600
_SERVE_SECONDS = 180


def planned() -> list[dict[str, str]]:
    """Return stage and text of every RUN of the Dockerfile, in order."""
    return [{"stage": name, "run": text} for name, stage in read_dockerfile().items() for text in stage.runs()]


def locks() -> dict[str, str]:
    """Return the SHA-256 of each requirement file that the steps install."""
    return {name: hashlib.sha256((ROOT / "docker" / f"{name}.txt").read_bytes()).hexdigest() for name in sorted(LOCKS)}


@dataclass
class _Layer:
    """A stage's files: the directory that it writes to, those below it, and what it runs with."""

    upper: Path
    lower: list[Path]
    environment: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def mounted(self, work: Path) -> Iterator[Path]:
        """Yield the stage's root."""
        root, scratch = work / "root", work / "scratch"
        for directory in (root, scratch, self.upper):
            directory.mkdir(parents=True, exist_ok=True)
        below = ":".join(map(str, self.lower))
        options = f"lowerdir={below},upperdir={self.upper},workdir={scratch}"
        _call("mount", "-t", "overlay", "overlay", "-o", options, str(root))
        try:
            yield root
        finally:
            _call("umount", "--recursive", str(root))


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _make_base(directory: Path, python: Path) -> _Layer:
    """Make what stands in for NVIDIA's image: Debian, Python with pip, and a Triton for it."""
    _call("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(directory))
    shutil.copy("/etc/resolv.conf", directory / "etc" / "resolv.conf")
    # The machine may reach its package servers through one whose certificate only it knows.
    shutil.copy(f"/{_CERTIFICATES}", directory / _CERTIFICATES)
    # At its own place, which is written into it, and which the image's user must be able to reach.
    shutil.copytree(python, directory / python.relative_to("/"), symlinks=True)
    for parent in python.relative_to("/").parents:
        (directory / parent).chmod(0o755)
    for name, target in (("python3", f"python{PYTHON_VERSION}"), ("pip", f"pip{PYTHON_VERSION}")):
        (directory / "usr" / "bin" / name).symlink_to(python / "bin" / target)
    triton = directory / IMAGE_DIRECTORY.relative_to("/")
    wheel = find_installation()
    for part in (wheel.python_backend, wheel.binary.parent):
        place = triton / ("backends/python" if part == wheel.python_backend else "bin")
        shutil.copytree(part, place, symlinks=True)
    shutil.copy(wheel.stub.parents[1] / PYTHON_VERSION / STUB_NAME, triton / "backends" / "python" / STUB_NAME)
    shutil.copytree(wheel.libraries[0], triton / "lib")
    paths = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return _Layer(directory, [], {"PATH": paths, "LD_LIBRARY_PATH": f"{IMAGE_DIRECTORY}/lib:{python}/lib"})


class _Builder:
    """Runs the steps of the Dockerfile's stages.

    Args:
        work: An empty directory for all of their files.
        python: The Python that stands in for the image's, with its own pip.
    """

    def __init__(self, work: Path, python: Path) -> None:
        self.work = work
        self.stages = read_dockerfile()
        base = next(iter(self.stages.values())).base
        self.layers = {base: _make_base(work / "base", python)}
        self.steps: list[dict[str, Any]] = []

    def build(self) -> bool:
        """Run every step of every stage; return whether all went well."""
        return all(self._stage(name, stage) for name, stage in self.stages.items())

    def _stage(self, name: str, stage: Stage) -> bool:
        base = self.layers[stage.base]
        lower = [base.upper, *base.lower]
        layer = self.layers[name] = _Layer(self.work / name / "files", lower, dict(base.environment))
        for key, value in stage.arguments.items():
            layer.environment[key] = value or stage.outer_arguments[key]
        with layer.mounted(self.work / name) as root:
            for instruction, text in stage.steps:
                if instruction == "ENV":
                    for word in shlex.split(text):
                        key, value = word.split("=", 1)
                        layer.environment[key] = re.sub(
                            r"\$\{(\w+)\}", lambda match: layer.environment[match[1]], value
                        )
                elif instruction == "COPY":
                    self._copy(root, text)
                elif instruction == "RUN" and not self._run(name, root, text):
                    return False
        # What an ARG sets ends with its stage; ENV goes on.
        for key in stage.arguments:
            layer.environment.pop(key, None)
        return True

    def _copy(self, root: Path, text: str) -> None:
        *sources, destination = text.split()
        for source in sources:
            for tracked in _call("git", "-C", str(ROOT), "ls-files", "-z", source).split("\0")[:-1]:
                inside = Path(tracked).relative_to(source) if (ROOT / source).is_dir() else Path(Path(tracked).name)
                target = root / destination.removeprefix("/") / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / tracked, target, follow_symlinks=False)

    def _run(self, name: str, root: Path, text: str) -> bool:
        print(f"\n== {name}: {text}", flush=True)
        mounts, command = _split_mounts(text)
        started = time.monotonic()
        with contextlib.ExitStack() as held:
            binds = {}
            for mount in mounts:
                if mount["type"] == "cache":
                    source = self.work / "cache"
                    source.mkdir(exist_ok=True)
                else:
                    other = self.layers[mount["from"]]
                    source = held.enter_context(other.mounted(self.work / mount["from"])) / mount["source"].lstrip("/")
                binds[mount["target"]] = source
            code = in_root(root, self.layers[name].environment, ["/bin/sh", "-c", command], binds)
        seconds = round(time.monotonic() - started, 1)
        self.steps.append({"stage": name, "run": text, "exit_code": code, "seconds": seconds})
        print(f"== exit code {code} after {seconds} s", flush=True)
        return code == 0

    def serve(self, name: str) -> dict[str, Any]:
        """Start a stage's entry point with its command, as its user and without a network, until its model is ready."""
        stage, layer = self.stages[name], self.layers[name]
        runtime = self.stages[stage.base]
        words = [*runtime.words("ENTRYPOINT"), *stage.words("CMD")]
        user, group = stage.last("USER").split(":")
        drop = ["/usr/bin/setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        check = shlex.join(["python3", "-m", "jevany_server.ready", *stage.words("CMD")])
        script = (
            f"cd {runtime.last('WORKDIR')}; {shlex.join(words)} & server=$!; "
            f"for second in $(seq {_SERVE_SECONDS}); do sleep 1; {check} && ready=yes && break; "
            "kill -0 $server || break; done; "
            'kill -TERM $server; wait $server; code=$?; echo "ends with $code"; test "$ready" = yes && exit $code'
        )
        print(f"\n== serve {shlex.join(words)}", flush=True)
        started = time.monotonic()
        with layer.mounted(self.work / name) as root:
            code = in_root(root, layer.environment, [*drop, "/bin/bash", "-c", script], {}, network=False)
        return {
            "stage": name,
            "command": words,
            "user": f"{user}:{group}",
            "network": False,
            "exit_code": code,
            "seconds": round(time.monotonic() - started, 1),
        }

    def versions(self, name: str) -> dict[str, str]:
        """Return the versions of what the steps ran with, as a stage has them."""
        commands = {
            "debian": "cat /etc/debian_version",
            "python": "/usr/bin/python3 --version",
            "pip": "pip --version | cut -d' ' -f2",
            "torch": "python3 -c 'import torch; print(torch.__version__)'",
        }
        with self.layers[name].mounted(self.work / name) as root:
            return {key: self._said(root, name, command) for key, command in commands.items()}

    def _said(self, root: Path, name: str, command: str) -> str:
        target = root / "tmp" / "said"
        in_root(root, self.layers[name].environment, ["/bin/sh", "-c", f"({command}) > /tmp/said"], {})
        text = target.read_text().strip()
        target.unlink()
        return text


def _split_mounts(text: str) -> tuple[list[dict[str, str]], str]:
    """Return what the --mount flags of a RUN say, and the command behind them."""
    mounts = []
    while match := re.match(r"--mount=(\S+) +", text):
        mounts.append(dict(part.split("=", 1) for part in match[1].split(",")))
        text = text[match.end() :]
    return mounts, text


def in_root(
    root: Path, environment: dict[str, str], command: list[str], binds: dict[str, Path], *, network: bool = True
) -> int:
    """Run a command in a root, with its own processes and mounts; return its exit code.

    Args:
        root: The root's directory.
        environment: All of the command's environment.
        command: Its words.
        binds: Directories to show there, by their place in it.
        network: Whether it sees the machine's network; else a loopback address of its own.
    """
    script = [
        "set -e",
        *([] if network else ["ip link set lo up"]),
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
    ]
    for place, source in binds.items():
        target = root / place.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        script.append(f"mount --bind {source} {target}")
    words = ["chroot", str(root), "/usr/bin/env", "--ignore-environment"]
    words += [f"PIP_CERT=/{_CERTIFICATES}", *(f"{key}={value}" for key, value in environment.items()), *command]
    script.append(f"exec {shlex.join(words)}")
    apart = [
        "unshare",
        *([] if network else ["--net"]),
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "/bin/sh",
        "-c",
        "\n".join(script),
    ]
    try:
        return subprocess.run(apart, stdin=subprocess.DEVNULL, timeout=_STEP_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def main() -> int:
    """Run all steps and write the record; the exit code is 0 if all of them went well."""
    parser = argparse.ArgumentParser(prog="tests.docker_steps", description=__doc__)
    parser.add_argument("python", type=Path, help=f"prefix of a Python {PYTHON_VERSION} with pip, outside of /usr")
    parser.add_argument("--work", type=Path, help="where the roots are made, on a disk with 20 GB free")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        print("docker_steps: needs root's rights and debootstrap", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="docker-steps-", dir=options.work) as work:
        builder = _Builder(Path(work), options.python.resolve())
        good = builder.build()
        served = builder.serve("cpu") if good else None
        base = next(iter(builder.stages.values()))
        record = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "root": f"Debian {_SUITE}, made by debootstrap",
            "versions": builder.versions("cpu") if good else {},
            "locks": locks(),
            "steps": builder.steps,
            "served": served,
            "not_run": {
                "docker": "no engine here: the steps ran by chroot, with overlays for stages",
                base.base: "cannot be had here: Debian stood in for its Ubuntu, and the wheel's Triton for its own",
                "gpu": "none here: the kernels were compiled and imported, and not run",
            },
        }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if good and served is not None and served["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
