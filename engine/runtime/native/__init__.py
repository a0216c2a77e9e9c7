"""The C library for CPUs, and its bindings."""
