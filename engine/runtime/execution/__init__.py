"""The runner: plans in, sampled ids out; CUDA graphs, ranks and the device's memory."""
