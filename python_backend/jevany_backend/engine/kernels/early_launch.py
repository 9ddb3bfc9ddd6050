"""Early launch: a kernel is brought onto the GPU while the one before it still runs, and waits there for its end.

CUDA calls it programmatic dependent launch; GPUs have it from Hopper on. Between small kernels it hides most of a
launch. Every kernel that is launched so waits before it reads or writes anything, so the order of all memory accesses
is the ordinary one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


def launch_options(early: bool) -> dict[str, Any]:
    """Return what a launch adds to its arguments.

    Args:
        early: Whether the kernel may be brought onto the GPU early.
    """
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Wait for the kernel before this one, and let the one after it come; the first thing that a kernel does."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
