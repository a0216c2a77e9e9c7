"""Prompts, fields, parsers and grammars: text before and after the engine."""
