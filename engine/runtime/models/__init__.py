"""Model architectures. families.py lists those of the decoder; load.py loads a model with its weights."""
