"""Load tests, benchmarks, the simulator and the tuner; `python -m loadtest` lists its commands."""
