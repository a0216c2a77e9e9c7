"""A daemon whose engine hangs at the next step after a request with the header `x-hang`, and that does not leave by itself."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import NoReturn

from server.http.in_process import Forwarded, Piece
from server.ray_serve import deployment


def wait_forever(*_: object) -> NoReturn:
    while True:
        threading.Event().wait()


class HangingDaemon(deployment.Daemon):
    """Ray's processes import it, so it is in a module of its own."""

    async def respond(self, request: Forwarded) -> AsyncIterator[Piece]:
        if b"x-hang" in dict(Forwarded(*request).headers):
            self._client.engine._runner.run = wait_forever  # type: ignore[method-assign]
            deployment.leave = lambda: None  # type: ignore[assignment,return-value]
        async for piece in super().respond(request):
            yield piece
