"""Starts and stops a real Triton Inference Server for the models of a repository."""
