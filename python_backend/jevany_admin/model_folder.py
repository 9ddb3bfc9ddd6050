"""A model's folder in a repository: its ``config.pbtxt``, read and written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2


class AdminError(Exception):
    """What was asked for cannot be done; the message says why in one line."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's configuration as Triton's Python backend hands it to the model.

    Args:
        folder: The model's folder.

    Raises:
        AdminError: There is no such file, or it is no configuration.
    """
    path = folder / "config.pbtxt"
    if not path.is_file():
        raise AdminError(f"{path}: missing; {folder} is not a model's folder")
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise AdminError(f"{path}: {error}") from None
    return json_format.MessageToDict(config, preserving_proto_field_name=True)


def parameters(config: dict[str, Any]) -> dict[str, str]:
    """Return a configuration's parameters by name."""
    return {name: value["string_value"] for name, value in config.get("parameters", {}).items()}


def check_name(name: str) -> None:
    """Check that a name can be a model's.

    Raises:
        AdminError: It cannot.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name, re.ASCII):
        raise AdminError(
            f"{name!r} cannot be a model's name: needs letters, digits, '.', '_' and '-', a letter or digit first"
        )


def model_py() -> str:
    """Return the text of a model's ``1/model.py``."""
    return '''"""Hands Triton the decision model; the settings are in config.pbtxt."""

from jevany_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def config_pbtxt(name: str, adapter: str, base: str | None, gpu: int | None, dtype: str) -> str:
    """Return the text of a model's ``config.pbtxt``, complete and commented.

    Args:
        name: The model's name.
        adapter: The checkpoint.
        base: Its base; None for the one that the checkpoint names.
        gpu: The GPU that it runs on; None for the CPU.
        dtype: What the weights are served in.
    """
    place = "kind: KIND_CPU" if gpu is None else f"kind: KIND_GPU\n    gpus: [ {gpu} ]"
    base_line = "" if base is None else f"\n{_parameter('base', base)}"
    return f'''# {name}: {adapter}

name: "{name}"
backend: "python"

# One request carries one question. Requests that wait together are handed over together, and each gets its own
# answer or its own error.
max_batch_size: 64
dynamic_batching {{ }}

# The JSON request: "state", and one "question" or "questions" with one entry.
input [
  {{
    name: "REQUEST"
    data_type: TYPE_STRING
    dims: [ 1 ]
  }}
]

# ANSWER is the JSON reply; PROBABILITIES has one number for each option, in the order of the request.
output [
  {{
    name: "ANSWER"
    data_type: TYPE_STRING
    dims: [ 1 ]
  }},
  {{
    name: "PROBABILITIES"
    data_type: TYPE_FP32
    dims: [ -1 ]
  }}
]

# KIND_CPU, or KIND_GPU with its number in "gpus"; one instance runs on each of several GPUs.
instance_group [
  {{
    count: 1
    {place}
  }}
]

# The checkpoint: a directory, from here, or owner/repository@revision on the Hub.
{_parameter("adapter", adapter)}

# The base it was trained on; without this line, the one that the checkpoint names.{base_line}

# checkpoint, or random: for an adapter of the releases, numbers in its true shape, with nothing to download, for
# measuring latency only. Every answer is then marked so.
{_parameter("weights", "checkpoint")}

# What the weights are served in: float32 or bfloat16.
{_parameter("dtype", dtype)}

# How it runs: automatic is the fastest way that is proven for the model: on a GPU engine, our own forward pass in CUDA
# graphs, in bfloat16, and sdpa (transformers with fused attention) in float32 or for other bases; on the CPU
# reference (transformers). default, kernels, sdpa and graphs are ways to run transformers, each with one thing more.
{_parameter("engine", "automatic")}

# The most tokens a request may have; longer ones are refused, never cut.
{_parameter("max_state_tokens", "8192")}
{_parameter("max_row_tokens", "8192")}
'''


def _parameter(key: str, value: str) -> str:
    text = text_format.MessageToString(model_config_pb2.ModelParameter(string_value=value), as_one_line=True)
    return f'parameters {{ key: "{key}" value: {{ {text} }} }}'
