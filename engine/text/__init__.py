"""Text on both sides of the engine: prompts, request fields, parsers and grammars. No torch, no HTTP."""
