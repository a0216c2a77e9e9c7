"""Attention backends. table.py lists them; base.py is their interface."""
