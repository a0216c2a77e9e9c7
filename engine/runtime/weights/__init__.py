"""Readers of weight files. formats.py lists them, checkpoint.py is their interface, and models/fill.py loads from them."""
