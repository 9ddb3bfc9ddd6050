"""``config.pbtxt`` parameters: what is read, and the words for what cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from jevany_backend.encoding import Limits
from jevany_backend.settings import SettingsError, place, read_settings

PARAMETERS = {"adapter": "owner/adapter@v1", "dtype": "bfloat16"}


def _arguments(parameters: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
    config = {
        "max_batch_size": 8,
        "input": [{"name": "REQUEST", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [
            {"name": "ANSWER", "data_type": "TYPE_STRING", "dims": [1]},
            {"name": "PROBABILITIES", "data_type": "TYPE_FP32", "dims": [-1]},
        ],
        "parameters": {k: {"string_value": v} for k, v in (PARAMETERS if parameters is None else parameters).items()},
    }
    return {
        "model_config": json.dumps(config | changes),
        "model_name": "model",
        "model_repository": "/models/model",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


def test_defaults() -> None:
    settings = read_settings(_arguments())
    assert (settings.name, settings.adapter, settings.base) == ("model", "owner/adapter@v1", None)
    assert settings.dtype is torch.bfloat16
    assert settings.device == torch.device("cpu")
    assert settings.engine is None
    assert settings.limits == Limits(state_tokens=8192, row_tokens=8192)


def test_every_parameter() -> None:
    values = {"adapter": "a", "base": "b", "dtype": "float32", "max_state_tokens": "10", "max_row_tokens": "20"}
    values["engine"] = "sdpa"
    settings = read_settings(_arguments(values))
    assert (settings.base, settings.dtype, settings.limits) == ("b", torch.float32, Limits(10, 20))
    assert settings.engine == "sdpa"


@pytest.mark.parametrize(
    ("parameters", "changes", "message"),
    [
        ({"dtype": "float32"}, {}, "parameter adapter: missing"),
        ({"adapter": "a"}, {}, "parameter dtype: missing"),
        ({"adapter": "a", "dtype": "fp16"}, {}, "parameter dtype: 'fp16' is not one of float32, bfloat16"),
        (PARAMETERS | {"engine": "fast"}, {}, "parameter engine: 'fast' is not one of automatic, reference, default, "),
        (PARAMETERS | {"max_row_tokens": "0"}, {}, "parameter max_row_tokens: '0' is not a positive whole number"),
        (PARAMETERS | {"max_row_tokens": "1e3"}, {}, "parameter max_row_tokens: '1e3' is not a positive whole"),
        (PARAMETERS | {"max_row_tokens": "٣"}, {}, "parameter max_row_tokens: '٣' is not a positive whole number"),
        (
            PARAMETERS | {"adaptor": "x"},
            {},
            "parameter adaptor: unknown; there are adapter, base, dtype, engine",
        ),
        (
            PARAMETERS | {"adapter": "/data/a"},
            {},
            "parameter adapter: '/data/a' starts outside the model's folder, and ",
        ),
        (PARAMETERS | {"base": "~/base"}, {}, "parameter base: '~/base' starts outside the model's folder, and Triton"),
        (PARAMETERS, {"max_batch_size": 0}, "max_batch_size: 0; needs 1 or more"),
        (PARAMETERS, {"input": []}, r"input: \[\]; needs \[\('REQUEST'"),
    ],
)
def test_what_cannot_be_is_named(parameters: dict[str, str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings(_arguments(parameters, **changes))


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place("CPU", "0") == torch.device("cpu")
    assert place("GPU", "1") == torch.device("cuda", 1)
    with pytest.raises(SettingsError, match="GPU 2 is asked for, but PyTorch sees 2 GPUs"):
        place("GPU", "2")
    for kind in ("AUTO", "MODEL", "KIND_AUTO"):
        with pytest.raises(SettingsError, match=f"kind {kind} leaves open where the model runs"):
            place(kind, "0")
