"""Grammars of constrained answers, compiled in the background by llguidance."""
