"""``jevany-admin add``: a folder for a checkpoint that can be served, and nothing for one that cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jevany_admin.command_line import main
from jevany_admin.model_folder import model_py, parameters, read_config
from jevany_backend.checkpoint import CheckpointError, load_text_model, open_checkpoint, stream
from jevany_backend.settings import read_settings
from tests.checkpoint_factory import MadeCheckpoint, make_checkpoint


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def _add(checkpoint: Path | str, repository: Path, *options: str) -> int:
    return main(["add", str(checkpoint), "--repository", str(repository), *options])


@pytest.mark.parametrize("family", ["qwen3_5", "muse_glimmer", "gemma4"])
@pytest.mark.parametrize("mode", ["pointer", "lm_token"])
def test_a_checkpoint_becomes_a_model(
    tmp_path: Path, repository: Path, family: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_checkpoint(tmp_path, family=family, decision_mode=mode)
    assert _add(made.adapter, repository, "--name", "my-jev", "--base", str(made.base), "--cpu") == 0
    folder = repository / "my-jev"
    assert [path.name for path in repository.iterdir()] == ["my-jev"]
    assert (folder / "1" / "model.py").read_text() == model_py()
    config = read_config(folder)
    settings = read_settings(
        {
            "model_config": json.dumps(config),
            "model_name": config["name"],
            "model_repository": str(folder),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    assert (settings.name, settings.adapter, settings.base) == ("my-jev", "1/checkpoint", "1/base")
    assert (folder / "1" / "checkpoint").readlink() == made.adapter
    assert (folder / "1" / "base").readlink() == made.base
    assert str(tmp_path) not in (folder / "config.pbtxt").read_text()
    assert settings.dtype is torch.float32
    # Every setting that there is stands in the file, so that nobody has to look it up.
    assert set(parameters(config)) == {
        *("adapter", "base", "weights", "dtype", "engine", "max_row_tokens", "max_state_tokens")
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: added"
    assert lines[2].startswith(f"  base        {made.base}: {family}_text, ")
    assert lines[3] == f"  readout     {'pointer' if mode == 'pointer' else 'direct token'}, temperature 1.25"
    assert lines[4] == "  device      cpu"
    assert re.fullmatch(r"  memory      \d\.\d GB \(0\.0 of weights in float32, 0\.00 of head, .* to run\)", lines[5])
    assert re.fullmatch(r"              fits: [\d.]+ GB of [\d.]+ are free here", lines[6])


def test_a_gpu_and_its_dtype(tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_checkpoint(tmp_path, head_changes={"base": str(tmp_path / "base")})
    assert _add(made.adapter, repository, "--name", "m", "--gpu", "3") == 0
    config = read_config(repository / "m")
    assert config["instance_group"] == [{"count": 1, "kind": "KIND_GPU", "gpus": [3]}]
    assert parameters(config)["dtype"] == "bfloat16"
    assert "base" not in parameters(config)
    lines = capsys.readouterr().out.splitlines()
    assert "  device      cuda:3" in lines
    assert lines[-1] == "warning: this machine has no GPU 3; a model for its CPU is added with --cpu"


def test_a_relative_directory_with_quotes_is_linked(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint(tmp_path / 'it\'s "here"')
    monkeypatch.chdir(made.adapter.parent)
    assert _add("adapter", repository, "--name", "m", "--base", "./base", "--cpu") == 0
    assert (repository / "m" / "1" / "checkpoint").readlink() == made.adapter
    assert (repository / "m" / "1" / "base").readlink() == made.base


def test_a_hub_reference_stays_as_it_is(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_checkpoint(tmp_path)
    snapshots = {"owner/adapter": made.adapter, "owner/base": made.base}
    monkeypatch.setattr(
        "jevany_backend.checkpoint.source.snapshot_download", lambda repository, **_: str(snapshots[repository])
    )
    assert _add("owner/adapter@v1", repository, "--name", "m", "--base", "owner/base", "--cpu") == 0
    found = parameters(read_config(repository / "m"))
    assert (found["adapter"], found["base"]) == ("owner/adapter@v1", "owner/base")


def test_too_little_memory_is_said(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_checkpoint(tmp_path)
    monkeypatch.setattr("jevany_admin.add.free_memory", lambda device: (10**8, 2 * 10**8))
    assert _add(made.adapter, repository, "--name", "m", "--base", str(made.base), "--cpu") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "              does NOT fit now: 0.1 GB of 0.2 are free here"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", r"models/taken: there already; choose another name or remove it"),
        (
            "../up",
            r"'\.\./up' cannot be a model's name: needs letters, digits, '\.', '_' and '-', a letter or digit first",
        ),
        (".hidden", r"'\.hidden' cannot be a model's name: .*"),
        ("", r"'' cannot be a model's name: .*"),
        ("a b", r"'a b' cannot be a model's name: .*"),
        ("x" * 129, r"'x+' cannot be a model's name: .*"),
    ],
)
def test_a_bad_name_is_refused(
    tmp_path: Path, repository: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "taken").mkdir()
    assert _add(tmp_path, repository, "--name", name) == 1
    assert re.fullmatch(rf"jevany-admin: .*{message}\n", capsys.readouterr().err)
    assert [path.name for path in repository.iterdir()] == ["taken"]


def _rewrite_head(made: MadeCheckpoint, **tensors: torch.Tensor) -> None:
    content = torch.load(made.adapter / "head.pt", weights_only=True)
    torch.save(content | {"head": content["head"] | tensors}, made.adapter / "head.pt")


def test_a_readout_that_cannot_be_served_is_refused_before_a_weight_is_read(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    untied = {"tie_word_embeddings": False}
    headless = make_checkpoint(tmp_path / "headless", decision_mode="lm_token", config_changes=untied)
    tensors = load_file(headless.base / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, headless.base / "model.safetensors", metadata={"format": "pt"})
    narrow = make_checkpoint(tmp_path / "narrow")
    _rewrite_head(narrow, **{"q.weight": torch.randn(16, 48), "k.weight": torch.randn(16, 48)})
    monkeypatch.setattr(stream.WeightStream, "read", lambda *_: pytest.fail("weights were read"))
    messages = {
        headless: f"{headless.base}: no lm_head.weight, and the embeddings are not tied to it",
        narrow: f"{narrow.adapter / 'head.pt'}: the head reads 48 values, but the base's hidden size is 64",
    }
    for made, message in messages.items():
        capsys.readouterr()
        assert _add(made.adapter, repository, "--name", "m", "--base", str(made.base), "--cpu") == 1
        assert capsys.readouterr().err == f"jevany-admin: {message}\n"
        assert not list(repository.iterdir())
        with pytest.raises(CheckpointError) as raised:
            load_text_model(open_checkpoint(str(made.adapter), str(made.base)), torch.device("cpu"), torch.float32)
        assert str(raised.value) == message


def test_a_checkpoint_that_cannot_be_served_leaves_nothing(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_checkpoint(tmp_path)
    other = make_checkpoint(tmp_path / "other", config_changes={"hidden_size": 32})
    capsys.readouterr()
    assert _add(made.adapter, repository, "--name", "m", "--base", str(other.base)) == 1
    assert re.fullmatch(r"jevany-admin: .* this adapter belongs to another base\n", capsys.readouterr().err)
    assert _add(tmp_path / "nowhere", repository, "--name", "m") == 1
    assert re.fullmatch(r"jevany-admin: adapter: no directory .*\n", capsys.readouterr().err)
    assert _add(made.adapter, tmp_path / "no-repository", "--name", "m") == 1
    assert capsys.readouterr().err == f"jevany-admin: {tmp_path / 'no-repository'}: no such directory\n"
    assert not list(repository.iterdir())
