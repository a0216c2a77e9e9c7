"""OpenAI's /v1/responses: bodies, items, events and stored responses."""
