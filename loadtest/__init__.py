"""Load tests, benchmarks, the simulator and the tuner.

`python -m loadtest --help` lists the commands.
"""
