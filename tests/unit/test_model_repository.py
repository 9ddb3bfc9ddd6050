"""Every ``config.pbtxt`` of the repository: parsed as Triton parses it, and read as the server reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from jevany_admin.model_folder import model_py, parameters, read_config
from jevany_backend.checkpoint import open_random
from jevany_backend.encoding import Limits
from jevany_backend.settings import Settings, SettingsError, read_settings

REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = sorted(path.parent.name for path in REPOSITORY.glob("*/config.pbtxt"))
RELEASES = {
    "jevany-27b": (
        "SimpleJev/JevAny-Qwen3.8-27B-LoRA@main",
        "Qwen/Qwen3.8-27B@1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0",
    ),
    "jevany-30b": (
        "SimpleJev/JevAny-Muse-Glimmer-30B-LoRA@main",
        "meta-models/Muse-Glimmer-30B@a4e59da52a7bc87ae7251dd5545c0dd437c44b68",
    ),
    "jevany-4b": ("SimpleJev/JevAny-Qwen3.5-4B-LoRA@main", "Qwen/Qwen3.5-4B@851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a"),
    "jevany-4b-direct-token": (
        "SimpleJev/JevAny-Qwen3.5-4B-Direct-Token-LoRA@main",
        "Qwen/Qwen3.5-4B@851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a",
    ),
    "jevany-gemma-4b": ("SimpleJev/JevAny-Gemma-4B-LoRA@main", "google/gemma-4-E4B-it"),
}


def _instances(config: dict[str, Any], gpus: int) -> Iterator[tuple[str, str]]:
    """What Triton makes of the instance groups on a machine with so many GPUs: each instance's kind and device."""
    for group in config["instance_group"]:
        devices = group.get("gpus", list(range(gpus))) if group["kind"] == "KIND_GPU" else [0]
        for device in devices:
            for _ in range(group.get("count", 1)):
                yield group["kind"].removeprefix("KIND_"), str(device)


def _settings(config: dict[str, Any], kind: str, device: str, folder: Path) -> Settings:
    return read_settings(
        {
            "model_config": json.dumps(config),
            "model_name": config["name"],
            "model_repository": str(folder),
            "model_instance_kind": kind,
            "model_instance_device_id": device,
        }
    )


def _placed(config: dict[str, Any], gpus: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    folder = REPOSITORY / config["name"]
    return [str(_settings(config, *instance, folder).device) for instance in _instances(config, gpus)]


@pytest.mark.parametrize("name", MODELS)
def test_a_config_is_complete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = REPOSITORY / name
    config = read_config(folder)
    assert (config["name"], config["backend"]) == (name, "python")
    assert config["max_batch_size"] > 0
    # Without a queue policy: with one that heeds timeouts, Triton 2.51 stalls for half a second now and then.
    assert config["dynamic_batching"] == {}
    assert (folder / "1" / "model.py").read_text() == model_py()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [instance] = _instances(config, 1)
    settings = _settings(config, *instance, folder)
    assert settings.limits == Limits(8192, 8192)
    assert not settings.random_weights
    # Every setting that there is stands in the file, so that nobody has to look it up.
    assert {"adapter", "base", "dtype", "engine", "max_row_tokens", "max_state_tokens"} <= set(parameters(config))


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_what_its_name_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(REPOSITORY / name)
    assert _placed(config, 1, monkeypatch) == ["cuda:0"]
    settings = _settings(config, "CPU", "0", REPOSITORY / name)
    assert (settings.adapter, settings.base) == RELEASES[name]
    assert settings.dtype is torch.bfloat16
    parameter = config["parameters"]["weights"]
    assert parameter == {"string_value": "checkpoint"}
    parameter["string_value"] = "random"
    assert _settings(config, "CPU", "0", REPOSITORY / name).random_weights
    assert (open_random(settings.adapter).labels is not None) == name.endswith("direct-token")


def test_all_releases_and_both_tiny_models_are_there() -> None:
    assert set(MODELS) == {*RELEASES, "jevany-tiny", "jevany-tiny-direct-token"}


GROUPS = {
    "one": "{ count: 1 kind: KIND_GPU gpus: [ 0 ] }",
    "all": "{ count: 1 kind: KIND_GPU }",
    "two of each": "{ count: 2 kind: KIND_GPU }",
    "several": "{ count: 1 kind: KIND_GPU gpus: [ 1 ] }, { count: 2 kind: KIND_GPU gpus: [ 0 ] }, { kind: KIND_CPU }",
    "eight": "{ count: 1 kind: KIND_GPU gpus: [ 0, 1, 2, 3 ] }, { count: 1 kind: KIND_GPU gpus: [ 4, 5, 6, 7 ] }",
}


@pytest.mark.parametrize(
    ("groups", "gpus", "devices"),
    [
        ("one", 1, ["cuda:0"]),
        ("one", 8, ["cuda:0"]),
        ("all", 1, ["cuda:0"]),
        ("all", 2, ["cuda:0", "cuda:1"]),
        ("all", 8, [f"cuda:{number}" for number in range(8)]),
        ("two of each", 2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        ("several", 2, ["cuda:1", "cuda:0", "cuda:0", "cpu"]),
        ("eight", 8, [f"cuda:{number}" for number in range(8)]),
    ],
)
def test_each_instance_has_its_device(
    groups: str, gpus: int, devices: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _placed(_with_groups(tmp_path, GROUPS[groups]), gpus, monkeypatch) == devices


@pytest.mark.parametrize(("groups", "gpus", "missing"), [("several", 1, 1), ("eight", 2, 2)])
def test_a_gpu_that_is_not_there_is_named(
    groups: str, gpus: int, missing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = _with_groups(tmp_path, GROUPS[groups])
    with pytest.raises(
        SettingsError, match=rf"^instance_group: GPU {missing} is asked for, but PyTorch sees {gpus} GPUs"
    ):
        _placed(config, gpus, monkeypatch)


def _with_groups(folder: Path, groups: str) -> dict[str, Any]:
    """Write jevany-4b's configuration with other instance groups into a folder; return it as Triton reads it."""
    path = REPOSITORY / "jevany-4b" / "config.pbtxt"
    message = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    message.ClearField("instance_group")
    text = text_format.MessageToString(message) + (f"\ninstance_group [ {groups} ]\n" if groups else "")
    (folder / "config.pbtxt").write_text(text + "# KIND_AUTO is only in this comment\n")
    return read_config(folder)


@pytest.mark.parametrize(
    "groups",
    [
        "{ count: 1 kind: KIND_AUTO }",
        "{ count: 1 }",
        "",
        "{ count: 1 kind: KIND_CPU }, { count: 1 }",
        "{ count: 1 }, { count: 1 kind: KIND_GPU gpus: [ 0 ] }",
        "{ count: 1 kind: KIND_GPU gpus: [ 0 ] }, { count: 1 kind: KIND_AUTO }",
    ],
)
def test_a_place_of_tritons_choice_is_refused(groups: str, tmp_path: Path) -> None:
    config = _with_groups(tmp_path, groups)
    # Triton hands over a kind that it chose itself.
    config["instance_group"] = [{"count": 1, "kind": "KIND_GPU", "gpus": [0]}]
    with pytest.raises(SettingsError) as raised:
        _settings(config, "CPU", "0", tmp_path)
    assert str(raised.value) == (
        "instance_group: kind KIND_AUTO leaves open where the model runs; write KIND_GPU with its gpus, or KIND_CPU"
    )


@pytest.mark.parametrize("groups", ["{ kind: KIND_MODEL }", "{ kind: KIND_CPU }, { kind: KIND_MODEL }"])
def test_kind_model_is_refused(groups: str, tmp_path: Path) -> None:
    config = _with_groups(tmp_path, groups)
    with pytest.raises(
        SettingsError, match=r"^instance_group: kind KIND_MODEL leaves open where the model runs; write KIND_GPU"
    ):
        _settings(config, "CPU", "0", tmp_path)


def test_the_readme_gives_the_measured_memory() -> None:
    root = REPOSITORY.parent
    measured = json.loads((root / "loadtest" / "results" / "released-models-variants.json").read_text())
    rows = re.findall(r"^\| `(jevany-[^`]+)` \| SimpleJev/.* \| ([0-9.]+) \|$", (root / "README.md").read_text(), re.M)
    assert dict(rows) == {name: f"{measured[name]['device_GB_peak']:.1f}" for name in RELEASES}
