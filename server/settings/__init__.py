"""Settings of the server. The engine's are in engine/settings/engine_config.py."""
