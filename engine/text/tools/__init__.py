"""Tool calls. formats.py lists the formats."""
