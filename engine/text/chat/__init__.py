"""How the served model writes: its chat format, its limits, and the text of an answer's tokens."""
