"""Images of conversations: decoded in a process of their own, made ready for a vision tower, and spelled in prompts."""
