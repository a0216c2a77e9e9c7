"""Triton kernels, and checks of the CUDA device."""
