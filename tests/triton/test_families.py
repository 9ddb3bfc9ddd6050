"""Every family through a real Triton: a checkpoint that was added with one command, and random weights."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from jevany_admin.command_line import main
from jevany_admin.model_folder import config_pbtxt, model_py
from jevany_backend.checkpoint import load_readout, load_text_model, open_checkpoint
from jevany_backend.decision_model import DecisionModel
from jevany_backend.encoding import RowEncoder
from jevany_backend.engine.reference import ReferenceEngine
from jevany_backend.protocol import JSON, parse_request
from jevany_bench.panel import read_panel
from jevany_client import Choice, Client, Noul, Question, Score
from jevany_client.messages import encode_request, encode_state
from jevany_loadtest.__main__ import PANELS
from jevany_server.backend_processes import find_backend_processes
from jevany_server.installation import ServerError
from jevany_server.process import TritonServer
from tests.checkpoint_factory import MadeCheckpoint, gemma_config, make_checkpoint
from tests.triton.conftest import FREE_PORTS

STATE: JSON = {"message": "We were charged twice. Please refund one of the payments today.", "plan": "business"}
QUESTIONS: dict[str, Question] = {
    "team": Choice("Which team?", {"billing": "Charges", "shipping": "Parcels", "technical": None}),
    "refund": Noul("Is a refund asked for?"),
    "urgency": Score("How urgent is it?", ["can wait", "within a week", "today"]),
}
# Each family with each readout, by the name of its model.
MODELS = {
    f"{family}-{readout}": (family, readout)
    for family in ("qwen3_5", "muse_glimmer", "gemma4")
    for readout in ("pointer", "lm_token")
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeCheckpoint]:
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name), family=family, decision_mode=readout)
        for name, (family, readout) in MODELS.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the repository and of its server's log."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def families(made: dict[str, MadeCheckpoint], models: Path) -> Iterator[TritonServer]:
    """A server of all models, each added by the command line."""
    for name, checkpoint in made.items():
        command = ["add", str(checkpoint.adapter), "--base", str(checkpoint.base), "--name", name, "--cpu"]
        assert main([*command, "--repository", str(models)]) == 0
    with (
        (models / "triton.log").open("wb") as log,
        TritonServer(models, [*made], ports=FREE_PORTS, log=log) as running,
    ):
        running.wait_until_ready(300)
        yield running


@pytest.mark.parametrize("name", MODELS)
def test_an_added_checkpoint_answers_as_its_weights_do(
    families: TritonServer, models: Path, made: dict[str, MadeCheckpoint], name: str
) -> None:
    assert f"{name}: {MODELS[name][0]}_text, " in (models / "triton.log").read_text()
    files = open_checkpoint(str(made[name].adapter), str(made[name].base))
    device = next(made[name].peft_model.parameters()).device
    model = load_text_model(files, device, made[name].peft_model.dtype)
    encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels)
    ours = DecisionModel(name, encoder, ReferenceEngine(model, load_readout(files, device, model.dtype)))
    with Client(families.grpc_url, name) as client:
        for question in QUESTIONS.values():
            decision = client.decide(STATE, question)
            expected = ours.decide(parse_request(encode_request(encode_state(STATE), question)))
            assert decision.probabilities.tolist() == pytest.approx(expected.probabilities.tolist(), abs=1e-5)
            assert decision.weights is None


@pytest.mark.parametrize("name", MODELS)
def test_no_caller_learns_where_the_files_are(
    families: TritonServer, made: dict[str, MadeCheckpoint], name: str
) -> None:
    shown = [f"/v2/models/{name}/config", f"/v2/models/{name}", f"/v2/models/{name}/stats"]
    for path in [*shown, "/v2/models/stats", "/v2/repository/index", "/v2"]:
        body = b"{}" if path.endswith("index") else None
        with urllib.request.urlopen(f"http://{families.http_url}{path}", body, timeout=30) as response:
            text = response.read().decode()
        assert name in text or path == "/v2"
        assert not re.search(r'"[/~]', text)
        assert str(made[name].base.parent) not in text
    with grpc_client.InferenceServerClient(families.grpc_url) as triton:
        parameters = triton.get_model_config(name).config.parameters
        assert parameters["adapter"].string_value == "1/checkpoint"
        assert parameters["base"].string_value == "1/base"


@pytest.fixture
def random_model(tmp_path: Path) -> Path:
    """A repository with one model, ``any``, in the shape of a release's."""
    gemma_config(600).save_pretrained(tmp_path / "shape")
    model = tmp_path / "models" / "any"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(model_py())
    (model / "1" / "base").symlink_to(tmp_path / "shape")
    config = config_pbtxt("any", "SimpleJev/JevAny-Gemma-4B-LoRA", "1/base", None, "bfloat16")
    (model / "config.pbtxt").write_text(config)
    return model.parent


def _ours(log: str) -> list[str]:
    """Return our own lines of a log that name the model ``any``: not those of Triton's C++ files, nor its tables."""
    triton = re.compile(r"\w\d{4} .* \w+\.cc:|\|")
    return [line for line in log.splitlines() if re.search(r"\bany\b", line) and not triton.match(line)]


def test_random_weights_say_so_in_every_answer_log_line_and_metric(random_model: Path, tmp_path: Path) -> None:
    config = (random_model / "any" / "config.pbtxt").read_text().replace('"automatic"', '"engine"')
    (random_model / "any" / "config.pbtxt").write_text(config)
    with (
        (tmp_path / "log").open("wb") as log,
        TritonServer(random_model, ["any"], ports=FREE_PORTS, log=log, weights="random") as server,
    ):
        server.wait_until_ready(300)
        with Client(server.grpc_url, "any") as client:
            for question in QUESTIONS.values():
                assert client.decide(STATE, question).weights == "random"
            assert client.decide_all(STATE, QUESTIONS)["weights"] == "random"
        _bare_numbers_are_refused(server)
        with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=10) as response:
            lines = re.findall(r"^jevany_.*$", response.read().decode(), re.M)
        # The engine's own counters are among them.
        assert {"jevany_model_info", "jevany_failed_requests_total", "jevany_tokens_total"} <= {
            line.partition("{")[0] for line in lines
        }
        assert all('weights="random"' in line for line in lines)
        _loadtest_has_the_panels_lengths(server, tmp_path)
    assert (random_model / "any" / "config.pbtxt").read_text() == config
    lines = _ours((tmp_path / "log").read_text())
    assert len(lines) > 3
    assert all("any (random weights): " in line for line in lines)


def _bare_numbers_are_refused(server: TritonServer) -> None:
    request = grpc_client.InferInput("REQUEST", [1, 1], "BYTES")
    request.set_data_from_numpy(
        np.array([[encode_request(encode_state(STATE), QUESTIONS["refund"])]], dtype=np.object_)
    )
    probabilities, answer = (grpc_client.InferRequestedOutput(name) for name in ("PROBABILITIES", "ANSWER"))
    with grpc_client.InferenceServerClient(server.grpc_url) as triton:
        with pytest.raises(InferenceServerException, match="the weights of this model are random, and only the output"):
            triton.infer("any", [request], outputs=[probabilities])
        for outputs in ([probabilities, answer], [answer], None):
            reply = triton.infer("any", [request], outputs=outputs)
            assert json.loads(reply.as_numpy("ANSWER")[0, 0])["weights"] == "random"


def test_the_commands_own_lines_say_that_weights_are_random(random_model: Path) -> None:
    command = [sys.executable, "-m", "jevany_server", "any", "--repository", str(random_model)]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--weights", "random"]
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert serving.stderr is not None
    lines = list(iter(serving.stderr.readline, "jevany_server: Ctrl-C stops the server\n"))
    [backend] = find_backend_processes(_children(serving.pid)[0])
    os.kill(backend.pid, signal.SIGKILL)
    lines += serving.communicate(timeout=60)[1].splitlines()
    assert serving.returncode == 1
    ours = [line for line in lines if re.match(r"jevany_server: .*\bany", line)]
    assert len(ours) == 2
    assert "any (random weights)" in ours[0]
    assert "the backend process of any_0_0 (random weights) was killed" in ours[1]


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def test_a_failed_load_says_that_weights_are_random(random_model: Path, tmp_path: Path) -> None:
    (tmp_path / "shape" / "config.json").write_text("{}")
    config = random_model / "any" / "config.pbtxt"
    config.write_text(
        config.read_text().replace(
            '"weights" value: { string_value: "checkpoint"', '"weights" value: { string_value: "random"'
        )
    )
    log = io.BytesIO()
    with TritonServer(random_model, ["any"], ports=FREE_PORTS, log=log) as server, pytest.raises(ServerError) as raised:
        server.wait_until_ready(60)
    assert str(raised.value).startswith("any (random weights): ")
    assert all("any (random weights)" in line for line in _ours(log.getvalue().decode()))


def _loadtest_has_the_panels_lengths(server: TritonServer, out: Path) -> None:
    command = [sys.executable, "-m", "jevany_loadtest", "any", "--rows", "5", "--repeats", "1", "--warm-up", "1"]
    command += ["--http-port", str(server.ports.http), "--grpc-port", str(server.ports.grpc)]
    command += ["--metrics-port", str(server.ports.metrics), "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "random text in the lengths of the panel's rows" in ended.stderr
    [path] = out.glob("any-serial-*.json")
    result = json.loads(path.read_text())
    assert (result["weights"], result["errors"]) == ("random", {})
    asked = dict(zip(result["samples"]["row"], result["samples"]["tokens"], strict=True))
    requests = read_panel(PANELS["jevbench-shape"]).requests[:5]
    assert asked == {row: request.tokens for row, request in enumerate(requests)}


@pytest.mark.parametrize("groups", ["{ kind: KIND_AUTO }", "{ kind: KIND_CPU }, { count: 1 }"])
def test_a_place_of_tritons_choice_is_refused(repository: Path, groups: str) -> None:
    config = repository / "small" / "config.pbtxt"
    text, replaced = re.subn(r"instance_group \[[^]]*\]", f"instance_group [ {groups} ]", config.read_text())
    assert replaced == 1
    config.write_text(text)
    server = TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO())
    with server, pytest.raises(ServerError) as raised:
        server.wait_until_ready(60)
    assert str(raised.value) == (
        "small: instance_group: kind KIND_AUTO leaves open where the model runs; "
        "write KIND_GPU with its gpus, or KIND_CPU"
    )
