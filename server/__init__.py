"""The HTTP server and the command line.

app.py lists the endpoints; serve.py starts `quire serve`.
"""
