"""The inference engine: scheduler, K/V cache, models and text; no HTTP. build.py wires it and loop.py runs it."""
