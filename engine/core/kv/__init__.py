"""K/V blocks: the pool, the prefix cache, and the tiers behind it.

Other packages allocate and free blocks through manager.py alone.
"""
