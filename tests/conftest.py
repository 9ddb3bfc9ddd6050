"""For every test: without a GPU, Triton's kernels run in its interpreter; it must be said before any is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
