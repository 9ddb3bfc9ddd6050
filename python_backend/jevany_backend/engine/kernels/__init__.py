"""Fused kernels in Triton, each in a file beside its plain PyTorch twin."""
