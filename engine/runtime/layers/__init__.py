"""Layers: mixers, by which tokens see one another, and feed-forwards.

parts.py says what a kind of either is. A new kind is one file here, and one line in layer.py.
"""
