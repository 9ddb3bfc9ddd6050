"""The parameters of a ``config.pbtxt``, as one checked dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from jevany_backend.encoding import Limits
from jevany_backend.engine.modes import MODES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = {"checkpoint": False, "random": True}
_ENGINES = {"automatic": None} | {mode: mode for mode in MODES}


class SettingsError(Exception):
    """A ``config.pbtxt`` that cannot be served; the message names the parameter and its value."""


@dataclass(frozen=True)
class Settings:
    """What a model's ``config.pbtxt`` says.

    Attributes:
        name: The model's name.
        directory: The model's directory in the repository, which relative paths start from.
        adapter: The checkpoint: a directory, or ``owner/repository[@revision]``.
        base: The base, likewise; None for the one the checkpoint names.
        random_weights: Whether the weights are random numbers in the true shape, for measuring latency.
        dtype: What the weights are served in.
        device: Where this instance runs.
        engine: How it runs, one of `engine.modes.MODES`; None for what `engine.modes.choose_mode` takes: on a GPU
            ``engine`` for the families that it computes, in bfloat16, and ``sdpa`` for all else; on the CPU
            ``reference``.
        limits: The most tokens a request may have.
    """

    name: str
    directory: Path
    adapter: str
    base: str | None
    random_weights: bool
    dtype: torch.dtype
    device: torch.device
    engine: str | None
    limits: Limits


def read_settings(args: Mapping[str, str]) -> Settings:
    """Read the arguments that Triton hands to a Python model's ``initialize``.

    Args:
        args: All strings: ``model_config`` is the configuration as JSON, ``model_repository`` the model's directory,
            ``model_instance_kind`` and ``model_instance_device_id`` the instance's place.

    Raises:
        SettingsError: A parameter is missing, unknown or has a value that cannot be.
    """
    config = json.loads(args["model_config"])
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    _check_tensors(config)
    _check_kinds(Path(args["model_repository"]))
    reader = _Reader(parameters)
    settings = Settings(
        name=args["model_name"],
        directory=Path(args["model_repository"]),
        adapter=reader.reference("adapter"),
        base=reader.reference("base", default="") or None,
        random_weights=reader.one_of("weights", _WEIGHTS, default="checkpoint"),
        dtype=reader.one_of("dtype", DTYPES),
        device=place(args["model_instance_kind"], args["model_instance_device_id"]),
        engine=reader.one_of("engine", _ENGINES, default="automatic"),
        limits=Limits(
            state_tokens=reader.positive("max_state_tokens", Limits.state_tokens),
            row_tokens=reader.positive("max_row_tokens", Limits.row_tokens),
        ),
    )
    reader.check_all_read()
    return settings


def place(kind: str, device_id: str) -> torch.device:
    """Return the device of a model instance.

    Args:
        kind: ``KIND_CPU`` or ``KIND_GPU``, as ``instance_group`` says.
        device_id: The GPU's number, as text.

    Raises:
        SettingsError: Another kind, or a GPU that is not there.
    """
    if kind == "CPU" or kind == "KIND_CPU":
        return torch.device("cpu")
    if kind == "GPU" or kind == "KIND_GPU":
        count = torch.cuda.device_count()
        if int(device_id) >= count:
            raise SettingsError(f"instance_group: GPU {device_id} is asked for, but PyTorch sees {count} GPUs")
        return torch.device("cuda", int(device_id))
    raise _open_place(kind)


def _open_place(kind: str) -> SettingsError:
    return SettingsError(
        f"instance_group: kind {kind} leaves open where the model runs; write KIND_GPU with its gpus, or KIND_CPU"
    )


def _check_kinds(directory: Path) -> None:
    # Triton puts a kind of its own choice in the place of KIND_AUTO and of a missing group before it hands over the
    # configuration, so only the file shows what was written.
    path = directory / "config.pbtxt"
    if not path.is_file():
        return
    try:
        # A newer Triton may know fields that these definitions lack.
        config = text_format.Parse(
            path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True
        )
    except text_format.ParseError as error:
        raise SettingsError(f"config.pbtxt: {error}") from None
    kinds = model_config_pb2.ModelInstanceGroup.Kind
    # No group at all leaves everything open; a group without a kind is one of KIND_AUTO.
    for group in config.instance_group or [model_config_pb2.ModelInstanceGroup()]:
        if group.kind not in (kinds.Value("KIND_CPU"), kinds.Value("KIND_GPU")):
            raise _open_place(kinds.Name(group.kind))


class _Reader:
    """Reads parameters one by one and remembers which were asked for."""

    def __init__(self, parameters: dict[str, str]) -> None:
        self.parameters = parameters
        self.read: list[str] = []

    def text(self, key: str, default: str | None = None) -> str:
        self.read.append(key)
        value = self.parameters.get(key, default)
        if value is None:
            raise SettingsError(f"parameter {key}: missing")
        return value.strip()

    def reference(self, key: str, default: str | None = None) -> str:
        value = self.text(key, default)
        if value.startswith(("/", "~")):
            raise SettingsError(
                f"parameter {key}: {value!r} starts outside the model's folder, and Triton shows it to every caller; "
                "put a symbolic link into the folder and name that"
            )
        return value

    def one_of(self, key: str, values: Mapping[str, Any], default: str | None = None) -> Any:
        value = self.text(key, default)
        if value not in values:
            raise SettingsError(f"parameter {key}: {value!r} is not one of {', '.join(values)}")
        return values[value]

    def positive(self, key: str, default: int) -> int:
        value = self.text(key, str(default))
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            raise SettingsError(f"parameter {key}: {value!r} is not a positive whole number")
        return int(value)

    def check_all_read(self) -> None:
        unknown = sorted(set(self.parameters) - set(self.read))
        if unknown:
            raise SettingsError(f"parameter {unknown[0]}: unknown; there are {', '.join(sorted(self.read))}")


_TENSORS = {
    "input": [("REQUEST", "TYPE_STRING", [1])],
    "output": [("ANSWER", "TYPE_STRING", [1]), ("PROBABILITIES", "TYPE_FP32", [-1])],
}


def _check_tensors(config: Mapping[str, Any]) -> None:
    for side, expected in _TENSORS.items():
        found = [(t["name"], t["data_type"], [int(size) for size in t["dims"]]) for t in config.get(side, [])]
        if found != expected:
            raise SettingsError(f"{side}: {found}; needs {expected}")
    if int(config.get("max_batch_size", 0)) < 1:
        raise SettingsError(f"max_batch_size: {config.get('max_batch_size', 0)}; needs 1 or more")
