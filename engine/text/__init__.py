"""Prompts, request fields, parsers and grammars: text before and after the engine.

No torch, no HTTP.
"""
