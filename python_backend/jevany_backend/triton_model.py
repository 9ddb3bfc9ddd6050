"""The one module that knows Triton: lifecycle, tensors in and out, errors."""

from __future__ import annotations

import gc
import json
import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from jevany_backend.checkpoint import (
    CheckpointError,
    CheckpointFiles,
    RandomRelease,
    check_shape_fits,
    first_line,
    load_readout,
    load_text_model,
    open_checkpoint,
    open_random,
    random_readout,
    random_text_model,
)
from jevany_backend.decision_model import DecisionModel, marked_name
from jevany_backend.encoding import Limits, RowEncoder
from jevany_backend.engine.cpu_threads import choose_threads
from jevany_backend.engine.modes import build_engine, choose_mode
from jevany_backend.engine.reference import hide_gpu_kernels
from jevany_backend.metrics import CANCELLED, EXPIRED, Metrics
from jevany_backend.protocol import DecisionError, InternalError, InvalidRequest, OutOfMemory, parse_request
from jevany_backend.settings import Settings, SettingsError, read_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger("jevany_backend")

# Where each of our errors stands among Triton's codes, which have no "too long" and no "out of memory". Names, since
# Triton adds its classes to pb_utils only after this module is imported.
_TRITON_CODES = {
    "invalid_request": "INVALID_ARG",
    "context_length_exceeded": "INVALID_ARG",
    "unsupported": "UNSUPPORTED",
    "not_ready": "UNAVAILABLE",
    "out_of_memory": "UNAVAILABLE",
    "internal": "INTERNAL",
}


class TritonPythonModel:
    """A decision model as Triton's Python backend drives it."""

    model: DecisionModel
    metrics: Metrics

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; when this returns, it is warm.

        Args:
            args: What Triton says about the instance; see `settings.read_settings`.

        Raises:
            TritonModelException: One line that says why the model cannot be served.
        """
        name = _log_name(args)
        _log_to_triton(name)
        try:
            _check_stub()
            settings = read_settings(args)
            self.model, mode = load_model(settings)
            _warm_up(self.model, settings.device)
            self.metrics = Metrics(
                {"model": settings.name, "version": args["model_version"], "instance": args["model_instance_name"]},
                mode,
                random_weights=settings.random_weights,
                counters=getattr(self.model.engine, "counters", None),
            )
            _keep_from_collector()
        except (SettingsError, CheckpointError) as error:
            raise pb_utils.TritonModelException(f"{name}: {error}") from None
        except torch.cuda.OutOfMemoryError as error:
            message = f"{name}: out of GPU memory: {first_line(error)}"
            raise pb_utils.TritonModelException(message) from None
        except Exception as error:
            log.exception("cannot be loaded")
            message = f"{name}: {type(error).__name__}: {first_line(error)}; the log has the traceback"
            raise pb_utils.TritonModelException(message) from None

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer a batch of requests, each with its own answer or its own error.

        Args:
            requests: Triton's requests, any number; each holds one REQUEST element.

        Returns:
            One response a request, in order.
        """
        begun = time.monotonic_ns()
        return [self._respond(request, begun) for request in requests]

    def finalize(self) -> None:
        """Let go of the weights and of the device's cached memory."""
        if hasattr(self, "metrics"):
            self.metrics.close()
        gc.unfreeze()
        if hasattr(self, "model"):
            del self.model
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        log.info("unloaded")

    def _respond(self, request: Any, begun: int) -> Any:
        if request.is_cancelled():
            return self._given_up(CANCELLED, "cancelled by the caller")
        # How long it has waited before this batch Triton does not say. It could refuse what waits too long itself, by
        # allow_timeout_override; but with that Triton 2.51 lets a request wait half a second for nothing now and then.
        # A caller's timeout is in microseconds, 0 for none.
        if 0 < request.timeout() * 1000 < time.monotonic_ns() - begun:
            return self._given_up(EXPIRED, "timeout expired")
        try:
            if self.model.random_weights:
                _check_mark(request)
            reply = self.model.decide(parse_request(_request_body(request)))
        except DecisionError as refusal:
            return self._failure(refusal)
        except torch.cuda.OutOfMemoryError:
            log.exception("out of GPU memory")
            return self._failure(
                OutOfMemory("the GPU has no memory left for this request; try again, or send a shorter one")
            )
        except Exception:
            # The caller gets a reference, the log gets the story: tracebacks and paths stay on the server.
            reference = secrets.token_hex(4)
            log.exception("internal error %s", reference)
            return self._failure(InternalError(f"the server failed; its log has the reason under {reference}"))
        body = json.dumps(reply.body, ensure_ascii=False).encode()
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("ANSWER", np.array([[body]], dtype=np.object_)),
                pb_utils.Tensor("PROBABILITIES", reply.probabilities[np.newaxis]),
            ]
        )

    def _given_up(self, kind: str, message: str) -> Any:
        self.metrics.failed(kind)
        error = pb_utils.TritonError(message, pb_utils.TritonError.CANCELLED)
        return pb_utils.InferenceResponse(output_tensors=[], error=error)

    def _failure(self, error: DecisionError) -> Any:
        self.metrics.failed(error.code)
        triton_error = pb_utils.TritonError(error.wire_text(), getattr(pb_utils.TritonError, _TRITON_CODES[error.code]))
        return pb_utils.InferenceResponse(output_tensors=[], error=triton_error)


def load_model(settings: Settings) -> tuple[DecisionModel, str]:
    """Load a decision model step by step, with one log line a step.

    Returns:
        The model, and the mode that its engine runs in.

    Raises:
        CheckpointError: The checkpoint or its base cannot be served.
    """
    if settings.device.type == "cpu":
        hide_gpu_kernels()
    step = _StepLog()
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)  # For kernels that run on whatever device is the current one.
    files: CheckpointFiles | RandomRelease
    if settings.random_weights:
        files = open_random(settings.adapter, settings.base, relative_to=settings.directory)
        step.done(f"random weights in the shape of {settings.adapter}: for measuring latency, answers mean nothing")
    else:
        files = open_checkpoint(
            settings.adapter,
            settings.base,
            relative_to=settings.directory,
            # Before the base's weights are downloaded, which may be 54 GB.
            check_shape=lambda config: check_shape_fits(
                config, settings.device, settings.dtype, _limits(settings, config).row_tokens
            ),
        )
        step.done(f"checkpoint {files.directory.name} read")
    readout_name = "direct token" if files.labels is not None else "pointer"
    limits = _limits(settings, files.config)
    log.info("%s, %s readout", files.config.model_type, readout_name)
    log.info("limits: %d tokens a state, %d a row", limits.state_tokens, limits.row_tokens)
    if isinstance(files, RandomRelease):
        text_model = random_text_model(files, settings.device, settings.dtype, limits.row_tokens)
        readout = random_readout(files, text_model, settings.dtype)
    else:
        text_model = load_text_model(files, settings.device, settings.dtype, limits.row_tokens)
        readout = load_readout(files, settings.device, settings.dtype)
    parameters = sum(parameter.numel() for parameter in text_model.parameters())
    step.done(f"weights ready: {parameters:,} parameters, {settings.dtype}, on {settings.device}")
    encoder = RowEncoder(files.tokenizer, files.delimiters, files.labels, limits)
    mode = choose_mode(settings.engine, settings.device, settings.dtype, files.config.model_type)
    engine = build_engine(mode, text_model, readout, limits.row_tokens)
    step.done(f"engine {mode} ready")
    return DecisionModel(settings.name, encoder, engine, random_weights=settings.random_weights), mode


def _limits(settings: Settings, config: PretrainedConfig) -> Limits:
    window = config.max_position_embeddings
    return Limits(min(settings.limits.state_tokens, window), min(settings.limits.row_tokens, window))


def _warm_up(model: DecisionModel, device: torch.device) -> None:
    step = _StepLog()
    body = b'{"state": "warm-up", "question": {"type": "noul", "instructions": "Is this the warm-up?"}}'
    model.decide(parse_request(body))
    if device.type == "cpu":
        threads = choose_threads(lambda: model.decide(parse_request(body)))
        log.info("computes on %d %s", threads, "thread" if threads == 1 else "threads")
    step.done("first decision made: ready")


def _keep_from_collector() -> None:
    """Keep what has been loaded from the garbage collector, since it lives as long as the process.

    There are some 400,000 objects, and looking through them takes the collector a quarter of a second, in the middle of
    a request.
    """
    gc.collect()
    gc.freeze()


def _check_mark(request: Any) -> None:
    """Check that a caller asks for the output that says that the weights are random.

    Raises:
        InvalidRequest: Only for bare numbers, which could pass for real ones; Triton's parameters of a response, which
            could mark them, are newer than the wheel's release.
    """
    if "ANSWER" not in request.requested_output_names():
        raise InvalidRequest(
            "outputs", "the weights of this model are random, and only the output ANSWER says so; ask for it as well"
        )


def _request_body(request: Any) -> bytes:
    elements = pb_utils.get_input_tensor_by_name(request, "REQUEST").as_numpy()
    if elements.size != 1:
        raise InvalidRequest("REQUEST", f"{elements.size} elements; one request carries one question")
    return elements.reshape(-1)[0]


def _check_stub() -> None:
    """Check that tensors cross between NumPy and Triton's stub unharmed.

    A stub built against NumPy 1 delivers wrong or empty tensors under NumPy 2, without an error.

    Raises:
        SettingsError: They do not.
    """
    sent = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    received = pb_utils.Tensor.from_dlpack("CHECK", pb_utils.Tensor("CHECK", sent).to_dlpack()).as_numpy()
    if not np.array_equal(sent, received):
        raise SettingsError(
            f"NumPy {np.__version__} does not work with this Triton's Python stub, which would deliver wrong "
            "probabilities; install numpy<2, or a Triton of 24.11 or later"
        )


class _StepLog:
    """Logs each load step with the time it took."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def done(self, message: str) -> None:
        now = time.perf_counter()
        log.info("%s (%.2f s)", message, now - self.started)
        self.started = now


class _TritonLogHandler(logging.Handler):
    """Passes log records to Triton's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


def _log_name(args: dict[str, str]) -> str:
    """Return what log lines and load failures call a model: its name, marked where its weights are random."""
    weights = json.loads(args["model_config"]).get("parameters", {}).get("weights", {}).get("string_value", "")
    return marked_name(args["model_name"], random_weights=weights.strip() == "random")


def _log_to_triton(model_name: str) -> None:
    handler = _TritonLogHandler()
    handler.setFormatter(logging.Formatter(f"{model_name}: %(message)s"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
