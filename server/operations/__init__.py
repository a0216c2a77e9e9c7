"""Quire's other endpoints: health, tokens, adapters, request states, the page.

Also the hand-over, and the table of routes that Quire does not have.
"""
