"""Answers requests that run the engine: submit, collect the events, write the answer."""
