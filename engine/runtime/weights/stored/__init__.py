"""Quantised checkpoints of safetensors as they are stored.

config.py reads `quantization_config`, checkpoint.py finds the packed modules in the files, storage.py asks how each is
stored, formats.py unpacks their tensors, packed.py dequantises them, or turns them into rows that the native library
multiplies.
"""
