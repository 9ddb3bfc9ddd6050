"""The forward passes of our own engine, one file a family of text decoders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jevany_backend.engine.families.decoder import Decoder

# By the type of transformers' text decoder: the module here, and the class in it.
_FAMILIES = {
    "qwen3_5_text": ("qwen3_5", "Qwen35"),
    "muse_glimmer_text": ("muse_glimmer", "MuseGlimmer"),
    "gemma4_text": ("gemma4", "Gemma4"),
}
OUR_FAMILIES = tuple(_FAMILIES)


def family(model_type: str) -> type[Decoder]:
    """Return the forward pass of a family.

    Args:
        model_type: One of `OUR_FAMILIES`.
    """
    # Triton comes with PyTorch for GPUs only, and these modules need it.
    module, name = _FAMILIES[model_type]
    found: type[Decoder] = getattr(import_module(f"{__name__}.{module}"), name)
    return found
