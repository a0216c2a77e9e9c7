"""The K/V pool and the batch that is computed over it."""
