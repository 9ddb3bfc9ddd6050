"""For every test: how Triton's kernels run, and that Ctrl-C means something to the processes that tests start.

Without a GPU the kernels run in Triton's interpreter; it must be said before any is imported.
"""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what it runs in the background with SIGINT ignored, and every process below would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
