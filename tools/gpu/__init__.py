"""Tests and measures everything on one GPU; loadtest/gpu.sh runs it."""
