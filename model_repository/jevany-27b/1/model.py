"""Hands Triton the decision model; the settings are in config.pbtxt."""

from jevany_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
