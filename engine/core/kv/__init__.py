"""K/V blocks: the pool, the prefix cache, and the tiers behind it. manager.py is the only entry from outside."""
