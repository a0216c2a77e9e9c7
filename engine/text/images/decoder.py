"""Decodes images of clients in a process that can be killed. Any thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.system.child_process import ChildCrashError, ChildError, ChildLostError, ChildProcess, Parts

_LIMIT_S = 120.0  # of waiting for an image that has little of the cores; of their time it has less


class ImageDecoder:
    """`decode` one image at a time; the process starts with the first one."""

    def __init__(self) -> None:
        self._child = ChildProcess("engine.text.images.decode_process", limit_s=_LIMIT_S)

    def decode(
        self, file: bytes, param: str, *, longest: int | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> NDArray[np.uint8]:
        """Return the rows of RGB of an image, at most `longest` pixels long and wide.

        Raises InvalidRequestError; OverloadedError where no process can be started, or if the image is not wanted any more.
        """
        try:
            why, *made = self._ask(file, longest, is_wanted)
        except ChildCrashError as error:
            raise refused("it takes too much memory or time to decode", param) from error
        except ChildError as error:  # the process got none of the cores, or was killed
            raise OverloadedError("Images cannot be decoded now; try again.", retry_after_s=1.0) from error
        if why:
            raise refused(why.decode(), param)
        size, rows = made
        width, height = map(int, size.split())
        return np.frombuffer(rows, np.uint8).reshape(height, width, 3)

    def interrupt(self) -> None:
        """Give up the image that is being decoded, if it is not wanted any more."""
        self._child.interrupt()

    def close(self) -> None:
        """End the process for good. Idempotent."""
        self._child.close()

    def _ask(self, file: bytes, longest: int | None, is_wanted: Callable[[], bool]) -> Parts:
        wish = b"" if longest is None else b"%d" % longest
        try:
            return self._child.ask([bytearray(file), bytearray(wish)])
        except ChildLostError:
            if not is_wanted():
                raise
        return self._child.ask([bytearray(file), bytearray(wish)])  # the interruption of another came a moment late


def refused(why: str, param: str) -> InvalidRequestError:
    """Return the error of an image that is not taken."""
    return InvalidRequestError(f"{param} has an image that cannot be used: {why}.", param=param)
