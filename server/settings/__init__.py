"""Settings of the server: declarations, sources, conflicts. The engine's are in engine/config.py."""
