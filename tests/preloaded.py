"""Imports what a daemon has imported when it is ready; a fork of a process that has done so begins there (tests/forked.py).

A fork computes on one thread unless it is asked for more, as tests do: daemons of two workers share two cores, and a thread
that has no work spins.

Nothing here reads the environment when it is imported, as transformers and the hub's library do.
"""

import torch

import engine.startup.build  # noqa: F401 - imported for its duration, as the next two
import server.daemon  # noqa: F401
import tests.cpu.ranks  # noqa: F401
from server.app import routers
from tests.patience import hurry_uvicorn

routers()
torch.set_num_threads(1)
hurry_uvicorn()
