"""Schedules: queues of requests and sequences, steps planned and committed. Engine thread."""
