"""One model on several processes: their collectives, and the slices of the weights that each holds."""
