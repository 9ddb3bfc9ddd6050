"""The in-process benchmark: every mode of a model on one panel, side by side, in one run."""
