"""Model architectures. families.py lists them; load.py loads a model."""
