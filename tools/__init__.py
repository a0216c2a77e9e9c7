"""Measures the sources, the build and parts of the engine; what drives a server is in loadtest."""
