"""Declares the functions of the C library, whose statuses become exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_int32
from typing import Any

from engine.core.errors import ComputeError, ModelLoadError

_CANNOT_READ, _NO_GROUP = 4, 5  # as in quire_cpu.h


class GroupError(RuntimeError):
    """Another rank of the model did not take part in a call in time, or ended."""


def declare(function: ctypes._NamedFuncPointer, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function with its types set."""
    function.restype, function.argtypes = result, arguments
    return function


def entry(function: ctypes._NamedFuncPointer, args: type[Structure]) -> Callable[[Structure], None]:
    """Return a function of one structure whose status is checked."""
    return checked(function, POINTER(args))  # by which ctypes passes a structure by reference


def checked(function: ctypes._NamedFuncPointer, *arguments: Any) -> Callable[..., None]:
    """Return a function whose status is checked."""
    declare(function, c_int32, *arguments)
    function.errcheck = _check  # type: ignore[assignment] # typeshed wants a result of the C type
    return function


def _check(status: int, *_: object) -> None:
    if status == _CANNOT_READ:
        raise ModelLoadError("A weight file became shorter or unreadable while it was being loaded; start again.")
    if status == _NO_GROUP:
        raise GroupError("A rank of the model did not take part in a step.")
    if status != 0:
        raise ComputeError("A native kernel found no memory for its scratch space; lower --max-num-batched-tokens.")
