"""The processes of one model on several ranks: the first rank's executor, and the worker that each other rank runs."""
