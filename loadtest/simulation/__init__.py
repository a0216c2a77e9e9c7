"""`quire simulate`: the real scheduler over simulated step times."""
