"""Stores of K/V blocks behind the pool, and what moves the bytes.

table.py lists the stores.
"""
