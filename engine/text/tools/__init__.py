"""Tool calls. formats.py lists the formats; the parsers find calls in a model's text."""
