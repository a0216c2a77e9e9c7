"""`quire simulate`: the real scheduler over simulated step times.

routers.py lists the routers of a fleet.
"""
