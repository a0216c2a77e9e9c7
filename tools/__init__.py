"""Measures the source tree itself; what measures a daemon is in loadtest."""
