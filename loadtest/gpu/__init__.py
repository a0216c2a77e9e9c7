"""Tests and measures everything on one GPU: `python -m loadtest.gpu`, or loadtest/gpu.sh."""
