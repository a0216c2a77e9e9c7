"""Recordings of a scheduler, for `quire simulate replay`."""
