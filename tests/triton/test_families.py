"""Every family through a real Triton: a checkpoint that was added with one command, and random weights."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client

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
from jevany_loadtest.server import Server
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
READOUTS = {"qwen3_5": "pointer", "muse_glimmer": "lm_token", "gemma4": "pointer"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeCheckpoint]:
    return {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family=family, decision_mode=readout)
        for family, readout in READOUTS.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the repository and of its server's log."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def families(made: dict[str, MadeCheckpoint], models: Path) -> Iterator[TritonServer]:
    """A server of one model a family, each added by the command line."""
    for family, checkpoint in made.items():
        command = ["add", str(checkpoint.adapter), "--base", str(checkpoint.base), "--name", family, "--cpu"]
        assert main([*command, "--repository", str(models)]) == 0
    with (
        (models / "triton.log").open("wb") as log,
        TritonServer(models, [*made], ports=FREE_PORTS, log=log) as running,
    ):
        running.wait_until_ready(300)
        yield running


@pytest.mark.parametrize("family", READOUTS)
def test_an_added_checkpoint_answers_as_its_weights_do(
    families: TritonServer, made: dict[str, MadeCheckpoint], family: str
) -> None:
    files = open_checkpoint(str(made[family].adapter), str(made[family].base))
    device = next(made[family].peft_model.parameters()).device
    model = load_text_model(files, device, made[family].peft_model.dtype)
    encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels)
    ours = DecisionModel(family, encoder, ReferenceEngine(model, load_readout(files, device, model.dtype)))
    with Client(families.grpc_url, family) as client:
        for question in QUESTIONS.values():
            decision = client.decide(STATE, question)
            expected = ours.decide(parse_request(encode_request(encode_state(STATE), question)))
            assert decision.probabilities.tolist() == pytest.approx(expected.probabilities.tolist(), abs=1e-5)
            assert decision.weights is None


@pytest.mark.parametrize("family", READOUTS)
def test_no_caller_learns_where_the_files_are(
    families: TritonServer, made: dict[str, MadeCheckpoint], family: str
) -> None:
    shown = [f"/v2/models/{family}/config", f"/v2/models/{family}", f"/v2/models/{family}/stats"]
    for path in [*shown, "/v2/models/stats", "/v2/repository/index", "/v2"]:
        body = b"{}" if path.endswith("index") else None
        with urllib.request.urlopen(f"http://{families.http_url}{path}", body, timeout=30) as response:
            text = response.read().decode()
        assert family in text or path == "/v2"
        assert not re.search(r'"[/~]', text)
        assert str(made[family].base.parent) not in text
    with grpc_client.InferenceServerClient(families.grpc_url) as triton:
        parameters = triton.get_model_config(family).config.parameters
        assert parameters["adapter"].string_value == "1/checkpoint"
        assert parameters["base"].string_value == "1/base"


def test_random_weights_say_so_in_every_answer_log_line_and_metric(tmp_path: Path) -> None:
    gemma_config(600).save_pretrained(tmp_path / "shape")
    model = tmp_path / "models" / "any"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(model_py())
    (model / "1" / "base").symlink_to(tmp_path / "shape")
    config = config_pbtxt("any", "SimpleJev/JevAny-Gemma-4B-LoRA", "1/base", None, "bfloat16")
    config += 'parameters { key: "weights" value: { string_value: "checkpoint" } }\n'
    (model / "config.pbtxt").write_text(config)
    with (
        (tmp_path / "log").open("wb") as log,
        TritonServer(tmp_path / "models", ["any"], ports=FREE_PORTS, log=log, weights="random") as server,
    ):
        server.wait_until_ready(300)
        with Client(server.grpc_url, "any") as client:
            for question in QUESTIONS.values():
                assert client.decide(STATE, question).weights == "random"
            assert client.decide_all(STATE, QUESTIONS)["weights"] == "random"
        metrics = Server(server.host, server.ports, started_here=True).metrics("any")
        assert metrics["jevany_model_info"][0]["weights"] == "random"
        _loadtest_has_the_panels_lengths(server, tmp_path)
    assert (model / "config.pbtxt").read_text() == config
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if '] "any' in line]
    assert len(lines) > 3
    assert all("any (random weights): " in line for line in lines)


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


def test_a_place_of_tritons_choice_is_refused(repository: Path) -> None:
    config = repository / "small" / "config.pbtxt"
    text = config.read_text()
    assert "kind: KIND_CPU" in text
    config.write_text(text.replace("kind: KIND_CPU", "kind: KIND_AUTO"))
    server = TritonServer(repository, ["small"], ports=FREE_PORTS, log=io.BytesIO())
    with server, pytest.raises(ServerError) as raised:
        server.wait_until_ready(60)
    assert str(raised.value) == (
        "small: instance_group: kind KIND_AUTO leaves open where the model runs; "
        "write KIND_GPU with its gpus, or KIND_CPU"
    )
