"""docker/, .env and .dockerignore, which no engine runs here, held against the code and against each other."""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jevany_server import __main__ as entrypoint
from jevany_server import ready
from jevany_server.installation import IMAGE_DIRECTORY
from jevany_server.process import STOP_SECONDS, Ports
from tests.docker_files import ROOT, Stage, read_compose, read_dockerfile
from tests.docker_steps import LOCKS, PYTHON_VERSION, RECORD, locks, planned

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = read_dockerfile()
DEFAULTS = {"cpu": "jevany-tiny", "gpu": "jevany-4b"}


def _lock(name: str) -> dict[str, tuple[Version, int]]:
    """Return version and number of hashes of each package of a locked requirement file."""
    text = re.sub(r" *#.*", "", (ROOT / "docker" / f"{name}.txt").read_text()).replace("\\\n", " ")
    packages: dict[str, tuple[Version, int]] = {}
    for line in filter(str.strip, text.splitlines()):
        pinned, *hashes = line.split()
        requirement, version = pinned.split("==")
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes)
        packages[canonicalize_name(requirement)] = (Version(version), len(hashes))
    return packages


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_a_hash_and_none_a_place(name: str) -> None:
    packages = _lock(name)
    assert packages
    assert all(hashes for _, hashes in packages.values())
    assert not re.search(
        r"https?:|^ *-", re.sub(r"#.*|--hash=", "", (ROOT / "docker" / f"{name}.txt").read_text()), re.M
    )


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_hold_what_is_asked_for(name: str) -> None:
    if name == "requirements":
        wanted = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["backend"]]
    else:
        lines = (ROOT / "docker" / f"{name}.in").read_text().splitlines()
        wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    packages = _lock(name)
    for requirement in wanted:
        version, _ = packages[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"run docker/lock: {requirement} and {version}"


def test_the_image_has_the_versions_of_the_test_suite() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {
        canonicalize_name(name): Version(version)
        for name, version in (line.split("==") for line in lines if not line.startswith("#"))
    }
    image = {name: version for name, (version, _) in _lock("requirements").items()}
    both = tested.keys() & image.keys()
    assert len(both) > 40
    assert {name: image[name] for name in both} == {name: tested[name] for name in both}


def test_the_kernels_are_built_with_the_cuda_of_the_image_s_torch() -> None:
    image, build = _lock("requirements") | _lock("kernels"), _lock("build")
    shared = image.keys() & build.keys()
    assert {"cuda-toolkit", "ninja", "nvidia-cuda-runtime"} <= shared
    assert {name: build[name] for name in shared} == {name: image[name] for name in shared}
    assert build["nvidia-cuda-nvcc"][0].release[:2] == image["nvidia-cuda-runtime"][0].release[:2]


def test_kernels_bring_nothing_that_the_rest_has_in_another_version() -> None:
    assert not _lock("kernels").keys() & _lock("requirements").keys()


def test_the_lock_script_writes_the_files_that_the_image_takes() -> None:
    script = ROOT / "docker" / "lock"
    assert script.stat().st_mode & stat.S_IXUSR
    written = re.findall(r"^lock (\w+) ", script.read_text(), re.M)
    assert sorted(written) == sorted(LOCKS)
    copied = {source for stage in STAGES.values() for source, _ in stage.copied() if source.startswith("docker/")}
    assert copied == {f"docker/{name}.txt" for name in LOCKS}
    for path in re.findall(r"[\w/.]+\.(?:in|toml)|constraints\.txt", re.sub(r"#.*", "", script.read_text())):
        assert (ROOT / path).is_file(), path


def test_what_the_image_copies_exists_and_the_build_sees_it() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    seen = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    sources = {source for stage in STAGES.values() for source, _ in stage.copied()}
    for source in sources:
        assert (ROOT / source).exists()
        assert any(Path(source).match(pattern) for pattern in seen), source
    for pattern in seen:
        assert any(Path(source).match(pattern) for source in sources), f"nothing of {pattern} is copied"


def test_stages_build_on_each_other() -> None:
    assert {name: stage.base for name, stage in STAGES.items()} == {
        "environment": "nvcr.io/nvidia/tritonserver:${TRITON_TAG}",
        "kernels": "environment",
        "runtime": "environment",
        "accelerated": "runtime",
        "project": "environment",
        "cpu": "runtime",
        "gpu": "accelerated",
    }
    assert list(STAGES)[-1] == "gpu"  # What a build without a target makes.
    for name, stage in STAGES.items():
        for source in re.findall(r"from=(\w+)", " ".join(stage.runs())):
            assert list(STAGES).index(source) < list(STAGES).index(name)


def _lineage(name: str) -> list[Stage]:
    """Return the stages that an image is made of, the lowest first."""
    stage = STAGES[name]
    return [*(_lineage(stage.base) if stage.base in STAGES else []), stage]


def _uses_the_network(command: str) -> bool:
    return "apt-get" in command or any(
        "--no-index" not in part for part in re.findall(r"\bpip (?:install|download|wheel) [^&]*", command)
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_changed_line_of_code_fetches_nothing_again(name: str) -> None:
    ours_is_in = False
    fetches = 0
    for instruction, text in (step for stage in _lineage(name) for step in stage.steps):
        sources = text.split()[:-1] if instruction == "COPY" else []
        ours_is_in |= any(not source.startswith("docker/") for source in sources)
        ours_is_in |= instruction == "RUN" and "from=project" in text
        if instruction == "RUN" and _uses_the_network(text):
            fetches += 1
            assert not ours_is_in, text
    assert fetches
    assert ours_is_in == (name in ("project", *DEFAULTS))


def test_the_images_differ_in_the_kernels_alone() -> None:
    assert STAGES["accelerated"].copied() == [("docker/kernels.txt", "/build/")]
    assert "from=kernels" in " ".join(STAGES["accelerated"].runs())
    assert "kernels" not in str([stage.steps for stage in _lineage("cpu")])
    assert STAGES["gpu"].steps[:-1] == STAGES["cpu"].steps[:-1]  # All but the default model.


def test_the_kernels_are_imported_where_they_are_installed() -> None:
    [command] = STAGES["accelerated"].runs()
    assert "python3 -c 'import causal_conv1d, fla.ops'" in command
    assert all("&& pip check" in STAGES[name].runs()[0] for name in DEFAULTS)


def test_every_install_is_checked_against_hashes_or_stays_inside_the_build() -> None:
    commands = [step for stage in STAGES.values() for step in stage.runs() if re.search(r"\bpip \w", step)]
    installs = re.findall(r"\bpip (?:install|download|wheel) [^&]*", " && ".join(commands))
    assert len(installs) >= 6
    for command in installs:
        assert "--require-hashes" in command or {"--no-index", "--no-deps"} <= set(shlex.split(command)), command


def test_kernels_for_the_a100_and_the_h200() -> None:
    assert STAGES["kernels"].arguments["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0"
    *_, build, check = STAGES["kernels"].runs()
    assert "export CAUSAL_CONV1D_FORCE_BUILD=TRUE " in build
    # What was built is looked at, whatever the settings were meant to do.
    assert 'bin/cuobjdump" --list-elf /build/built/causal_conv1d_cuda*.so > /build/elf' in check
    assert re.search(r'grep "sm_\$\{architecture\}\\\." /build/elf \|\| \{ .*exit 1; \}', check)


def test_the_base_image_is_one_that_shows_a_dead_model() -> None:
    tag = STAGES["environment"].outer_arguments["TRITON_TAG"]
    year, month = map(int, re.fullmatch(r"(\d\d)\.(\d\d)-py3", tag).groups())  # type: ignore[union-attr]
    assert (year, month) >= (26, 4)
    # One that is known to exist: its client is on PyPI, in the versions that the image installs.
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(rf"^# {year}\.{month:02} is Triton {_lock('requirements')['tritonclient'][0]}, ", text, re.M)
    assert f"${{TRITON_TAG:-{tag}}}" in (ROOT / "docker" / "compose.yaml").read_text()


def _runtime() -> Stage:
    return STAGES["runtime"]


def test_the_server_is_not_root_and_writes_to_the_cache_alone() -> None:
    assert [STAGES[name].last("USER") for name in DEFAULTS] == ["1000:1000", "1000:1000"]
    home = _runtime().environment["HOME"]
    for key in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert _runtime().environment[key].startswith(f"{home}/")
    assert any(f"install --directory --owner 1000 --group 1000 {home}" in step for step in _runtime().runs())
    # Root, which has the same home from there on, must not leave files in it.
    for name in ("accelerated", *DEFAULTS):
        assert all(" export HOME=/root " in f" {step}" for step in STAGES[name].runs())


def test_labels() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]+)"', _runtime().last("LABEL")))
    assert labels["title"] == PROJECT["name"]
    assert labels["version"] == PROJECT["version"]
    assert labels["licenses"] == PROJECT["license"]
    assert labels["source"] in (ROOT / "README.md").read_text()
    assert labels["base.name"] == STAGES["environment"].base


def test_no_secrets_and_no_places_of_packages() -> None:
    for path in (*(ROOT / "docker").iterdir(), ROOT / ".env", ROOT / ".dockerignore"):
        if path.is_file() and path.suffix != ".txt":
            text = path.read_text()
            assert not re.search(
                r"--(?:extra-)?index-url|--find-links|HF_TOKEN *[=:] *\S|PASSWORD|hf_[A-Za-z0-9]{8}", text
            ), path
            assert set(re.findall(r"https?://[\w.]+", text)) <= {"https://github.com"}, path


def test_the_record_of_the_steps_is_of_this_dockerfile() -> None:
    record = json.loads(RECORD.read_text())
    recorded = [{key: step[key] for key in ("stage", "run")} for step in record["steps"]]
    assert recorded == planned(), "run python -m tests.docker_steps"
    assert record["locks"] == locks(), "run python -m tests.docker_steps"
    assert not any(step["exit_code"] for step in record["steps"])
    assert record["served"]["exit_code"] == 0
    assert record["served"]["command"] == [*_runtime().words("ENTRYPOINT"), *STAGES["cpu"].words("CMD")]
    assert record["served"]["user"] == STAGES["cpu"].last("USER")
    assert record["not_run"].keys() == {"docker", STAGES["environment"].base, "gpu"}
    assert record["versions"]["python"].startswith(f"Python {PYTHON_VERSION}.")


# The entry point and its command line.


def _parsed(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    command = [*_runtime().words("ENTRYPOINT"), *arguments]
    assert command[:3] == ["python3", "-m", "jevany_server"]
    monkeypatch.setattr("sys.argv", command[2:])
    return entrypoint._parse_arguments()


def test_the_entry_point_is_a_command_line_that_the_code_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in DEFAULTS.items():
        options = _parsed(*STAGES[name].words("CMD"), monkeypatch=monkeypatch)
        assert options.model == [model]
    assert options.host == "0.0.0.0"
    assert str(options.repository) == "/models"
    assert all(STAGES[name].copied() == [("model_repository", "/models/")] for name in DEFAULTS)
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    assert ports == tuple(vars(Ports()).values())
    assert _runtime().last("EXPOSE").split() == [str(port) for port in ports]


def test_the_environment_s_python_comes_first_on_the_path() -> None:
    environment = STAGES["environment"]
    directory = environment.environment["PATH"].split(":")[0]
    assert environment.environment["PIP_PYTHON"] == f"{directory}/python3"
    assert any(f"-m venv --without-pip {Path(directory).parent}" in step for step in environment.runs())
    assert STAGES["kernels"].environment["CUDA_HOME"].startswith(f"{Path(directory).parent}/lib/python3.12/")
    assert not IMAGE_DIRECTORY.is_relative_to(Path(directory).parent)


# Compose.


def _services(**settings: str) -> dict[str, Any]:
    return read_compose(**settings)["services"]


def test_a_plain_up_starts_the_gpu_service_and_the_profile_the_other() -> None:
    dotenv = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if not line.startswith("#"))
    assert dotenv == {"COMPOSE_FILE": "docker/compose.yaml", "COMPOSE_PROFILES": "gpu"}
    assert (ROOT / dotenv["COMPOSE_FILE"]).is_file()
    # --profile replaces COMPOSE_PROFILES, so the two, which share their ports, never start together.
    profiles = {name: service["profiles"] for name, service in _services().items()}
    assert profiles == {"server": ["gpu"], "server-cpu": ["cpu"]}


def test_the_gpu_is_reserved_for_the_service_that_needs_it() -> None:
    services = _services()
    [device] = services["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "1", ["gpu"])
    assert "deploy" not in services["server-cpu"]
    [device] = _services(GPUS="all")["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == "all"


def test_the_build_is_that_of_the_dockerfile() -> None:
    image = f"{PROJECT['name']}:{PROJECT['version']}"
    services = _services()
    assert [service["image"] for service in services.values()] == [image, f"{image}-cpu"]
    for service in services.values():
        build = service["build"]
        context = (ROOT / "docker" / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).is_file()
        assert build["args"] == STAGES["environment"].outer_arguments
        assert service["profiles"] == [build["target"]]
        assert build["target"] in STAGES


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, {"server": ["jevany-4b"], "server-cpu": ["jevany-tiny"]}),
        ({"MODEL": "jevany-27b"}, {"server": ["jevany-27b"], "server-cpu": ["jevany-27b"]}),
        ({"MODEL": "a b"}, {"server": ["a", "b"], "server-cpu": ["a", "b"]}),
    ],
)
def test_model_chooses_what_is_served_and_what_is_asked_for(
    settings: dict[str, str], models: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, service in _services(**settings).items():
        assert _parsed(*shlex.split(service["command"]), monkeypatch=monkeypatch).model == models[name]
        check = shlex.split(service["healthcheck"]["test"])
        assert check[:3] == ["python3", "-m", ready.__name__]
        assert check[3:] == models[name]


def _kinds(model: str) -> set[str]:
    config = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    return set(re.findall(r"KIND_\w+", re.sub(r"#.*", "", config)))


@pytest.mark.parametrize("service", ["server", "server-cpu"])
def test_the_default_model_runs_where_its_service_does(service: str) -> None:
    target = _services()[service]["build"]["target"]
    assert _services()[service]["command"] == DEFAULTS[target]
    assert _kinds(DEFAULTS[target]) == {f"KIND_{target.upper()}"}


def test_the_default_of_the_cpu_needs_no_download() -> None:
    config = (ROOT / "model_repository" / DEFAULTS["cpu"] / "config.pbtxt").read_text()
    for key in ("adapter", "base"):
        assert re.search(rf'key: "{key}" value: {{ string_value: "1/', config)


def test_ports_are_published_on_the_loopback_address_unless_told_otherwise() -> None:
    for service in _services().values():
        assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in vars(Ports()).values()]
    settings = {"BIND_ADDRESS": "10.0.0.1", "HTTP_PORT": "1", "GRPC_PORT": "2", "METRICS_PORT": "3"}
    assert _services(**settings)["server"]["ports"] == ["10.0.0.1:1:8000", "10.0.0.1:2:8001", "10.0.0.1:3:8002"]


def test_times_fit_those_of_the_runtime() -> None:
    for service in _services().values():
        assert _seconds(service["stop_grace_period"]) > STOP_SECONDS
        assert _seconds(service["healthcheck"]["timeout"]) > 5 * 5  # Each of five models may take its whole timeout.
    # A model that is not there after this long ends the server, so it must not count as unhealthy before.
    assert _seconds(_services()["server"]["healthcheck"]["start_period"]) >= entrypoint.LOAD_SECONDS


def _seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def test_volumes_are_where_the_server_looks() -> None:
    compose = read_compose()
    for service in compose["services"].values():
        assert service["volumes"] == [f"cache:{_runtime().environment['HOME']}", "../model_repository:/models:ro"]
        assert service["tmpfs"] == [_runtime().last("WORKDIR")] == ["/tmp"]
    assert list(compose["volumes"]) == ["cache"]


def test_containment() -> None:
    for service in _services().values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True
        assert service["restart"] == "unless-stopped"
        assert service["shm_size"] == "1gb"
        assert service["logging"]["driver"] == "json-file"
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & service.keys()


def test_the_hub_s_settings_are_passed_through_and_the_cpu_stays_offline() -> None:
    services = _services()
    # A name without a value takes the value of whoever runs compose.
    assert services["server"]["environment"] == ["HF_TOKEN", "HF_HUB_OFFLINE"]
    assert services["server-cpu"]["environment"] == ["HF_HUB_OFFLINE=1"]


def test_every_setting_is_described_in_the_compose_file() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    described = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", text[: text.index("name: jevany")]))
    used = set(re.findall(r"\$\{(\w+)", text)) | {"HF_TOKEN", "HF_HUB_OFFLINE"}
    assert used <= described


def test_env_is_tracked() -> None:
    result = subprocess.run(["git", "check-ignore", ".env", "docker/compose.yaml"], cwd=ROOT, check=False)
    assert result.returncode == 1  # Neither is ignored.
