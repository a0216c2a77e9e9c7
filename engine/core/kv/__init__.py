"""K/V blocks: the pool, the prefix cache and the tiers; other packages use manager.py alone."""
