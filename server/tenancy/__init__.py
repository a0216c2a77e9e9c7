"""Tenants: their file, their limits, and the owners of stored objects."""
