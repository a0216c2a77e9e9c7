"""Settings of the server. The engine's are in engine/config.py."""
