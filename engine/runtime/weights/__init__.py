"""Readers of weight files; checkpoint.py is their interface.

engine/runtime/models/load.py chooses a reader.
"""
