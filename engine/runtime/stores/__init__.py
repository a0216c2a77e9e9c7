"""Stores of K/V blocks behind the pool: host memory, files of a folder, and the folders of other daemons.

engine/startup/stores.py lists those that cached blocks go to.
"""
