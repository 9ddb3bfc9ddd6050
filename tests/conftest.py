"""For every test: without a GPU, Triton's kernels run in its interpreter, which must be said before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
