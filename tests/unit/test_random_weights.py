"""Random weights in the true shape: the shapes of the releases, and that every answer says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jevany_backend.checkpoint import CheckpointError, open_random, random_readout, random_text_model
from jevany_backend.checkpoint.plan import build_model
from jevany_backend.checkpoint.random_weights import random_memory_need, stand_in_tokenizer
from jevany_backend.decision_model import DecisionModel
from jevany_backend.encoding import Limits, RowEncoder
from jevany_backend.engine.reference import ReferenceEngine
from jevany_backend.protocol import parse_request
from tests.checkpoint_factory import byte_tokenizer, gemma_config, muse_config, qwen_config

CPU, META = torch.device("cpu"), torch.device("meta")
RELEASES = {
    "SimpleJev/JevAny-Qwen3.8-27B-LoRA": 25_624_600_064,
    "SimpleJev/JevAny-Muse-Glimmer-30B-LoRA": 26_509_949_440,
    "SimpleJev/JevAny-Qwen3.5-4B-LoRA": 4_205_751_296,
    "SimpleJev/JevAny-Qwen3.5-4B-Direct-Token-LoRA": 4_205_751_296,
    "SimpleJev/JevAny-Gemma-4B-LoRA": 7_463_013_376,
}
SMALL = {
    "Qwen3.8-27B": qwen_config,
    "Muse-Glimmer-30B": muse_config,
    "Gemma-4B": gemma_config,
    "Qwen3.5-4B-Direct-Token": qwen_config,
}


@pytest.mark.parametrize("adapter", RELEASES)
def test_a_release_has_its_true_shape(adapter: str) -> None:
    release = open_random(f"{adapter}@main", "Qwen/Qwen3.8-27B@1d4bf0f")
    model = build_model(release.config, META, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == RELEASES[adapter]
    assert len(release.tokenizer) == release.config.vocab_size
    assert max(release.delimiters.ids) < release.config.vocab_size
    assert (release.labels is not None) == ("Direct-Token" in adapter)


def test_other_adapters_have_no_shape() -> None:
    with pytest.raises(
        CheckpointError, match=r"^weights random: 'runs/my-jev' is no release; there are SimpleJev/JevAny-"
    ):
        open_random("runs/my-jev")


def _small(directory: Path, release: str) -> str:
    config = SMALL[release](600)
    config.save_pretrained(directory)
    return f"SimpleJev/JevAny-{release}-LoRA"


@pytest.mark.parametrize("release", SMALL)
def test_a_random_model_answers_and_says_so(tmp_path: Path, release: str) -> None:
    files = open_random(_small(tmp_path, release), ".", relative_to=tmp_path)
    model = random_text_model(files, CPU, torch.bfloat16, 400)
    need = random_memory_need(files, torch.bfloat16, 400)
    assert need.weights == sum(value.nbytes for value in model.state_dict().values())
    again = random_text_model(files, CPU, torch.bfloat16, 400)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert model.get_parameter("layers.0.mlp.up_proj.weight").float().std() == pytest.approx(64**-0.5, rel=0.1)
    encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels, Limits(300, 400))
    readout = random_readout(files, model, torch.bfloat16)
    decisions = DecisionModel("m", encoder, ReferenceEngine(model, readout), random_weights=True)
    question = {"type": "choice", "criteria": {"a": None, "b": None, "c": None}}
    reply = decisions.decide(parse_request(json.dumps({"state": "x" * 200, "question": question}).encode()))
    assert reply.body["weights"] == "random"
    assert list(reply.body)[:2] == ["model", "weights"]
    assert reply.probabilities.sum() == pytest.approx(1)


def test_a_tokenizer_beside_the_shape_is_used(tmp_path: Path) -> None:
    adapter = _small(tmp_path, "Gemma-4B")
    byte_tokenizer(characters="é").save_pretrained(tmp_path)
    assert len(open_random(adapter, str(tmp_path)).tokenizer) == len(byte_tokenizer(characters="é"))


def test_a_broken_shape_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: 'model_type'"):
        open_random("SimpleJev/JevAny-Gemma-4B-LoRA", str(tmp_path))


def test_the_stand_in_tokenizer_has_the_size_asked_for() -> None:
    tokenizer = stand_in_tokenizer(1000)
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 1000
    text = "a line\nand été ¡ <filler 3>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)  # One a byte, and one for each letter that can be a label.
    with pytest.raises(ValueError, match="vocab_size is 500; the stand-in tokenizer needs 517"):
        stand_in_tokenizer(500)


def test_scores_of_random_gemma_layers_have_a_deviation_of_one(tmp_path: Path) -> None:
    release = open_random(_small(tmp_path, "Gemma-4B"), str(tmp_path))
    model = random_text_model(release, CPU, torch.float32, 100)
    for layer in range(3):  # Those behind have no keys of their own.
        query, key = (model.get_parameter(f"layers.{layer}.self_attn.{name}_norm.weight") for name in "qk")
        # Normed queries and keys are of length sqrt(width) times their weight, in random directions.
        assert float(query[0] * key[0]) * len(query) ** 0.5 == pytest.approx(1)
