"""The daemon as an application of Ray Serve: one ingress, and replicas that each have an engine.

    client -> Ray's HTTP proxy -> Ingress (asgi.py): path and body -> Ray's router, the less loaded of two at random
           -> Daemon (deployment.py): the application of `quire serve`, called in its own process (asgi.py)

Only deployment.py imports ray. The extra `ray` of pyproject.toml installs it.
"""
