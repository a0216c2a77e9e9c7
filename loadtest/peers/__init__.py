"""Other servers to compare with: how each is started, and the models it needs."""
