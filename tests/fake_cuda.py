"""A CUDA device that is made of this machine's CPU, so that code for CUDA runs where there is none.

    pytest -p tests.fake_cuda tests/gpu

Kernels run under Triton's interpreter. Tensors are in main memory and say that they are on the device, streams and events
have nothing to wait for, and a graph is computed again where it is launched. It has no memory limit, and no speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch

CAPABILITY = (9, 0)
_TOTAL = 4 << 30
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_is_device_in_use = False  # tensors say where the newest engine is: a CPU's engine is compared in the same process


class Event:
    """An event, which has always happened."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """A stream, on which everything has been done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> Event:
        return Event()


class Graph:
    """A graph; see `_replay_by_computing`."""

    def replay(self) -> None:
        raise NotImplementedError("the fake device records nothing: compute again instead")


def install() -> None:
    """Make the device. Nothing undoes it."""
    os.environ["TRITON_INTERPRET"] = "1"
    from engine.runtime.cuda import available, toolchain

    available.has_triton = lambda device: device.type != "cpu"  # as where kernels are compiled
    from tests.kernels import conftest  # noqa: F401 - mends the interpreter, while there is no device

    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    device = torch.Tensor.device
    torch.Tensor.is_cuda = property(lambda _: _is_device_in_use)  # type: ignore[assignment]
    torch.Tensor.device = property(  # type: ignore[assignment]
        lambda self: torch.device("cuda", 0) if _is_device_in_use else device.__get__(self)  # type: ignore[attr-defined]
    )
    for name, value in _cuda().items():
        setattr(torch.cuda, name, value)
    toolchain.TOOLS.pop("GPU driver")
    _note_the_device_of_engines()
    _warm_up_shortly()
    _replay_by_computing()


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes tensors in main memory, whatever device it is given."""

    def place(value: Any) -> Any:
        is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("cpu") if is_device else value

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*map(place, args), **{name: place(value) for name, value in kwargs.items()})

    return call


def _cuda() -> dict[str, Any]:
    """Return what takes the place of torch.cuda's functions, a different one for each: torch's compiler tells them apart."""
    about = SimpleNamespace(
        name="made of a CPU", total_memory=_TOTAL, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=4
    )
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: SimpleNamespace(value=0), cudaHostUnregister=lambda *_: SimpleNamespace(value=0)
    )
    constants = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": about.name,
        "get_device_properties": about,
        "get_arch_list": ["sm_90"],
        "mem_get_info": (_TOTAL // 2, _TOTAL),
        "memory_reserved": _TOTAL // 4,
        "max_memory_reserved": _TOTAL // 4,
        "graph_pool_handle": (0, 0),
        "cudart": runtime,
    }
    nothings = (
        "empty_cache",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    )
    scopes = {name: _returning(nullcontext()) for name in ("stream", "graph", "device")}
    classes: dict[str, Any] = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph}
    returned = {name: _returning(value) for name, value in constants.items()}
    streams = {"current_stream": lambda *_: Stream()}
    return returned | classes | scopes | streams | {name: _returning(None) for name in nothings}


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _note_the_device_of_engines() -> None:
    from engine.startup import build

    resolve = build.resolve_device

    def note(name: str) -> torch.device:
        global _is_device_in_use  # noqa: PLW0603 - the process has one device
        _is_device_in_use = False
        device = resolve(name)
        _is_device_in_use = device.type == "cuda"
        return device

    build.resolve_device = note


def _warm_up_shortly() -> None:
    """Have an engine start with steps of a few tokens: the interpreter takes half a minute for hundreds."""
    from engine.startup import build

    full_steps, other_steps = build.full_steps, build.other_steps
    build.full_steps = lambda config, size: full_steps(
        replace(config, max_num_batched_tokens=config.max_num_seqs), size
    )
    build.other_steps = lambda config: other_steps(replace(config, max_num_batched_tokens=8))


def _replay_by_computing() -> None:
    """Have graphs compute."""
    from engine.runtime.execution.decode_graphs import DecodeGraphs

    def record(self: DecodeGraphs, size: int, max_context: int, _: Any) -> Callable[[], Any]:
        self._compute(size, max_context)
        return partial(self._compute, size, max_context)

    DecodeGraphs._record = record  # type: ignore[method-assign]


install()
