"""The model code of jevany-triton: what stands between Triton and the answer to a typed question."""
