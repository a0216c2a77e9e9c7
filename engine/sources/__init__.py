"""Finds models, adapters and drafts, and fetches them from a hub."""
