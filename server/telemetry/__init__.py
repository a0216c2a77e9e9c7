"""Metrics, logs, and the states of requests."""
