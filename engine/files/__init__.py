"""Readers of the small files of a model; torch is not imported."""
