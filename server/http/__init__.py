"""HTTP below the endpoints: connections, bodies, origins, the OpenAPI document.

Endpoints are in openai, anthropic, batches and operations.
"""
