"""Readers of weight files. formats.py lists them, checkpoint.py is their interface, and fill.py loads from them."""
