"""A CUDA device in main memory that computes at the launch, and refuses what CUDA does not order.

    with fake_device() as device: ...

Tensors on it are those of a CPU that are known by their memory; two modes of torch see every call and every operator. An
operator computes at once, and its accesses are compared by fake_order.py. The host sees what it has waited for: a copy into
pinned memory leaves garbage there until then, and a copy from it fails if the memory has changed. New memory is garbage.
A graph records operators and launches them again; what its recording wrote is undone. Triton's kernels run under its
interpreter, which knows every address. Streams and events belong to the device that is made up at the time of a call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_order import HOST, Clock, Memory, Order, OrderError, Region, Ticket, call_site, place

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_TOTAL = 4 << 30
_UNWRITTEN = 0xFF  # NaN, or -1
_IN_FLIGHT = 0xA5
# Operators that return numbers, or tensors of a size that depends on numbers: the host waits for its stream.
_WAITING = {"item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "allclose"}
_WAITING |= {"unique", "unique2", "_unique2", "unique_consecutive", "unique_dim", "bincount"}
_READ_NOTHING = {f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
_READ_NOTHING |= {f"{name}_like" for name in ("empty", "full", "ones", "rand", "randn", "zeros")}
_FILL_NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_here = threading.local()  # of a thread: is_away (from the device's eyes), stream, graph that it records


class Held(Memory):
    """Memory of the device, or pinned memory of the host."""

    def __init__(self, tensor: Tensor, actor: int, where: str, *, is_pinned: bool, graph: Graph | None = None) -> None:
        storage = tensor.untyped_storage()
        super().__init__(storage.nbytes(), actor, where)
        self.storage, self.is_pinned, self.graph = StorageWeakRef(storage), is_pinned, graph
        self.address = storage.data_ptr()
        array = (ctypes.c_uint8 * storage.nbytes()).from_address(self.address) if storage.nbytes() else ()
        self.raw: NDArray[np.uint8] = (
            np.asarray(array, np.uint8) if not storage.nbytes() else np.frombuffer(array, np.uint8)
        )
        self.recorded: set[int] = set()  # streams of record_stream


class Access(NamedTuple):
    """Bytes that a launch reads or writes."""

    memory: Held
    region: Region
    is_write: bool


class Copy(NamedTuple):
    """A copy between the device and pinned memory, until the host knows that it has ended."""

    ticket: Ticket
    memory: Held
    region: Region
    content: NDArray[np.uint8]  # from it: at the launch; into it: what arrives
    tensor: Tensor  # keeps the memory

    def touches(self, memory: Held, region: Region) -> bool:
        """Return whether it may have bytes in common with a region."""
        if memory is not self.memory:
            return False
        (begin, end), (first, stop) = _bounds(region), _bounds(self.region)
        return begin < stop and first < end


class Graph:
    """Takes the place of torch.cuda.CUDAGraph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.works: list[tuple[str, Callable[[], list[Access]]]] = []
        self.saved: dict[Held, NDArray[np.uint8]] = {}  # what the recording overwrote
        self.made: list[Held] = []
        self.is_launched = False

    def replay(self) -> None:
        """Launch it."""
        device, where = active(), call_site()
        with device.lock, away(), torch.inference_mode():
            self.is_launched = True
            for what, work in self.works:
                device.note(f"{what}, in a graph launched at {where}", work(), self)

    def reset(self) -> None:
        """Forget everything."""
        self.works.clear()


class Event:
    """Takes the place of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: Clock | None = None
        self._was_asked = False

    def record(self, stream: Stream | None = None) -> None:
        """Happen after all that a stream has been given."""
        device = active()
        if not device.drops("record"):
            device.forbid_in_recording("record") if stream is None else None
            self._clock, self._was_asked = device.clock_of(stream), False

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait for it."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Wait for it."""
        active().host_joins("synchronize", self._clock)

    def query(self) -> bool:
        """Return whether it has happened: not before it is asked again."""
        if self._was_asked:
            active().host_joins("query", self._clock)
        self._was_asked = not self._was_asked
        return not self._was_asked

    def elapsed_time(self, _: Event) -> float:
        """Return a time."""
        return 1.0


class Stream:
    """Takes the place of torch.cuda.Stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    @property
    def actor(self) -> int:
        """Return its number among the device's."""
        return active().actor_of(self)

    cuda_stream = actor

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after all that it has been given."""
        event, device = event or Event(), active()
        if not device.drops("record_event"):
            event._clock = device.clock_of(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Go on after an event."""
        if not active().drops("wait_event") and event._clock is not None:
            active().stream_joins(self.actor, event._clock)

    def wait_stream(self, other: Stream) -> None:
        """Go on after all that another stream has been given."""
        if not active().drops("wait_stream"):
            active().stream_joins(self.actor, active().clock_of(other))

    def synchronize(self) -> None:
        """Wait for all that it has been given."""
        active().host_joins("synchronize", active().clock_of(self))

    def query(self) -> bool:
        """Return whether it is idle."""
        return False


class FakeDevice:
    """The memory, the streams and the copies under way. `dropped` is a call site of the engine whose wait is left out."""

    def __init__(self, dropped: str | None = None) -> None:
        self.order, self.lock = Order(), threading.RLock()
        self.default_stream = Stream()
        self.dropped = dropped
        self.sites: set[str] = set()  # of the engine: its waits
        self.hidden: set[str] = set()  # of the engine: calls in which torch waits for the stream
        self.num_launches = self.num_graphs = 0
        self._actors: dict[Stream, int] = {}
        self._held: dict[int, Held] = {}  # by storage
        self._shared: set[Held] = set()  # used by other streams than the one it came from
        self._sources: list[Copy] = []
        self._landings: list[Copy] = []
        self._registered: list[tuple[int, int]] = []  # address and bytes of memory that was pinned later

    # -- streams ------------------------------------------------------------------------------------------------------

    def actor_of(self, stream: Stream) -> int:
        """Return a stream's number in the order."""
        if stream not in self._actors:
            self._actors[stream] = self.order.add_actor()
        return self._actors[stream]

    def clock_of(self, stream: Stream | None) -> Clock:
        """Return a stream's knowledge after all that it was given."""
        actor = (stream or current_stream()).actor
        self.stream_joins(actor, self.order.clocks[HOST])
        return self.order.clocks[actor].copy()

    def stream_joins(self, actor: int, clock: Clock) -> None:
        """Have a stream go on after what a clock knows."""
        with self.lock:
            self.order.join(actor, clock)

    def host_joins(self, what: str, clock: Clock | None) -> None:
        """Have the host go on after what a clock knows, and see what arrived."""
        self.forbid_in_recording(what)
        if clock is None or self.drops(what):
            return
        with self.lock:
            self.order.join(HOST, clock)
            self._land()

    def synchronize(self) -> None:
        """Wait for all streams."""
        everything = self.order.clocks[HOST].copy()
        for clock in self.order.clocks:
            np.maximum(everything, clock, out=everything)
        self.host_joins("device synchronize", everything)

    def drops(self, what: str) -> bool:
        """Note a wait of the engine; return whether it is the one to leave out."""
        site = f"{call_site()} {what}"
        if site.startswith("engine/"):
            self.sites.add(site)
        return site == self.dropped

    def forbid_in_recording(self, what: str) -> None:
        """Raise OrderError if this thread records a graph."""
        if recorded() is not None:
            raise OrderError(f"{place(what)} while a graph is recorded")

    # -- memory -------------------------------------------------------------------------------------------------------

    def find(self, tensor: Tensor) -> Held | None:
        """Return the memory of a tensor on the device, or of a pinned one."""
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None and self._registered and self._is_registered(storage.data_ptr()):
            held = self._keep(Held(tensor, HOST, place("pinned memory"), is_pinned=True))
        return held

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        held = self.find(tensor)
        return held is not None and not held.is_pinned

    def adopt(self, tensor: Tensor, what: str, *, is_filled: bool) -> Held:
        """Count a tensor's memory as the device's."""
        actor, graph = current_stream().actor, recorded()
        if graph is None:
            self._refuse_early_reuse(actor, what)
        held = self._keep(Held(tensor, actor, what, is_pinned=False, graph=graph))
        if graph is not None:
            graph.made.append(held)
        if not is_filled:
            held.raw[:] = _UNWRITTEN
        return held

    def adopt_pinned(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory as pinned."""
        self.forbid_in_recording("an allocation of pinned memory")
        held = self._keep(Held(tensor, HOST, place("pinned memory"), is_pinned=True))
        held.writer[:], held.written[:] = HOST, 0
        return tensor

    def register(self, address: int, num_bytes: int, _: int) -> Any:
        """Pin memory that is there."""
        self._registered.append((address, num_bytes))
        return SimpleNamespace(value=0)

    def unregister(self, address: int) -> Any:
        """Unpin it."""
        busy = next((copy for copy in (*self._sources, *self._landings) if copy.memory.address == address), None)
        if busy is not None:
            raise OrderError(f"{place('unpinned')} while {self.order.describe(busy.ticket)} is under way")
        self._registered = [each for each in self._registered if each[0] != address]
        return SimpleNamespace(value=0)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Not reuse a tensor's memory before a stream is done with it."""
        held = self.find(tensor)
        assert held is not None
        held.recorded.add(stream.actor)

    def _keep(self, held: Held) -> Held:
        if len(self._held) % 512 == 511:
            self._held = {key: each for key, each in self._held.items() if not each.storage.expired()}
        self._held[held.storage.cdata] = held
        return held

    def _is_registered(self, address: int) -> bool:
        return any(begin <= address < begin + size for begin, size in self._registered)

    def _refuse_early_reuse(self, actor: int, what: str) -> None:
        """Raise OrderError if memory came back to a stream while another uses it."""
        for held in [held for held in self._shared if held.storage.expired() and held.actor == actor]:
            self._shared.discard(held)
            for ticket in self.order.others_use(held):
                if ticket.actor not in held.recorded:
                    raise OrderError(
                        f"{what} may get the memory of {held.place}, which {self.order.describe(ticket)} still uses"
                    )

    # -- launches -----------------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operator, and note its accesses."""
        name = func._schema.name.partition("::")[2]
        tensors = list(_tensors(func, args, kwargs))
        held = [self.find(tensor) for _, tensor in tensors]
        if all(each is None for each in held):
            return func(*args, **kwargs)
        is_on_device = any(each is not None and not each.is_pinned for each in held)
        with self.lock:
            if (
                name == "copy_"
                and is_on_device
                and not all(each is not None and not each.is_pinned for each in held[:2])
            ):
                return self.transfer(
                    args[0], args[1], is_waited=not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                )
            if not is_on_device:
                return self._on_host(func, name, args, kwargs, tensors)
            _refuse_two_devices(name, tensors, held)
            if name in _WAITING or _has_mask(name, args):
                self._wait_for_number(name)
            return self._launch(func, name, args, kwargs, tensors)

    def _launch(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[tuple[bool, Tensor]]
    ) -> Any:
        what, graph = place(name), recorded()
        if graph is not None:
            self._save(graph, [tensor for is_write, tensor in tensors if is_write])
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for _, tensor in tensors}
        made = [each for each in _flat(out) if each.untyped_storage()._cdata not in known]
        if isinstance(out, (Tensor, list, tuple)) and not made and not any(is_write for is_write, _ in tensors):
            return out  # views
        for each in made:
            self.adopt(each, what, is_filled=name not in _FILL_NOTHING)
        accesses = self._accesses(name, args, tensors, made)
        self.note(what, accesses)
        if graph is not None:

            def again() -> list[Access]:
                results = [each for each in _flat(func(*args, **kwargs)) if each.untyped_storage()._cdata not in known]
                for old, new in zip(made, results, strict=True):
                    old.copy_(new)
                return self._accesses(name, args, tensors, made)

            graph.works.append((what, again))
        return out

    def _accesses(
        self, name: str, args: Any, tensors: list[tuple[bool, Tensor]], made: Sequence[Tensor]
    ) -> list[Access]:
        accesses = []
        for is_write, tensor in tensors:
            held = self.find(tensor)
            if held is None or (name in _READ_NOTHING and not is_write):
                continue
            at = _rows(name, args) if tensor is args[0] else None
            accesses.append(Access(held, _region(tensor, *(at or ())), is_write))
        if name not in _FILL_NOTHING:
            accesses += [Access(self._held[each.untyped_storage()._cdata], _region(each), True) for each in made]
        return accesses

    def note(self, what: str, accesses: Sequence[Access], graph: Graph | None = None) -> Ticket:
        """Note a launch on the current stream, by a graph if given; one that is recorded accesses nothing."""
        graph = graph or recorded()
        ticket = self.order.launch(current_stream().actor, what)
        self.num_launches += 1
        for memory, region, is_write in accesses:
            if memory.graph is not None:
                self._refuse_others(memory.graph, graph, memory, what)
            if recorded() is not None:
                continue
            self.order.access(ticket, memory, region, is_write=is_write)
            if memory.actor != ticket.actor and not memory.is_pinned and memory.graph is None:
                self._shared.add(memory)
        return ticket

    def _refuse_others(self, owner: Graph, graph: Graph | None, memory: Held, what: str) -> None:
        if graph is not owner and (graph is not None or not owner.is_launched):
            raise OrderError(
                f"{what} uses the memory of {memory.place}, which belongs to a graph that may not have run"
            )

    def _save(self, graph: Graph, written: Sequence[Tensor]) -> None:
        """Keep what a recording overwrites."""
        for tensor in written:
            held = self.find(tensor)
            if held is not None and held.graph is not graph and held not in graph.saved:
                graph.saved[held] = held.raw.copy()

    def _note_hidden(self, what: str) -> None:
        if (site := call_site()).startswith("engine/"):
            self.hidden.add(f"{site} {what}")

    def _wait_for_number(self, what: str) -> None:
        """Have the host wait for its stream."""
        self.forbid_in_recording(what)
        self._note_hidden(what)
        self.order.join(HOST, self.clock_of(None))
        self._land()

    def _on_host(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[tuple[bool, Tensor]]
    ) -> Any:
        """Compute on pinned memory, as the host."""
        known = {tensor.untyped_storage()._cdata for _, tensor in tensors}
        out = func(*args, **kwargs)
        is_view = all(each.untyped_storage()._cdata in known for each in _flat(out)) and isinstance(
            out, (Tensor, list, tuple)
        )
        if not is_view or any(is_write for is_write, _ in tensors):
            for is_write, tensor in tensors:
                self.host_touches(name, tensor, is_write=is_write)
        return out

    def host_touches(self, name: str, tensor: Tensor, *, is_write: bool) -> None:
        """Note that the host reads or writes a tensor, if that is pinned."""
        held = self.find(tensor)
        if held is not None:
            with self.lock:
                self.order.access(self.order.launch(HOST, place(name)), held, _region(tensor), is_write=is_write)

    # -- copies -------------------------------------------------------------------------------------------------------

    def transfer(self, to: Tensor, source: Tensor, *, is_waited: bool) -> Tensor:
        """Copy between the device and the host."""
        what = place("a copy")
        self.forbid_in_recording("a copy between host and device")
        accesses, held = [], self.find(source)
        if held is not None:
            accesses.append(Access(held, _region(source), False))
        target = self.find(to)
        if target is not None:
            accesses.append(Access(target, _region(to), True))
        ticket = self.note(what, accesses)
        arriving = [copy for copy in self._landings if held is not None and copy.touches(held, accesses[0].region)]
        for copy in arriving:  # the stream's order, which was just compared, puts them before this
            copy.memory.raw[copy.region] = copy.content
        with torch.inference_mode():
            to.copy_(source)
        for copy in arriving:
            copy.memory.raw[copy.region] = _IN_FLIGHT
        if self.is_on_device(to):
            if held is not None and not arriving:
                region = accesses[0].region
                self._sources.append(Copy(ticket, held, region, held.raw[region].copy(), source))
            if (
                is_waited and held is None
            ):  # what is not pinned is read before the call returns; torch waits even longer
                self._note_hidden("a copy of memory that is not pinned")
            is_waited = is_waited and held is not None
        elif not is_waited:
            self._fly(ticket, to, target or self._keep(Held(to, HOST, what, is_pinned=True)))
        if is_waited:
            self._wait_for_number("a copy that is waited for")
        return to

    def _fly(self, ticket: Ticket, to: Tensor, held: Held) -> None:
        """Have the host see the content of `to` when it has waited for it."""
        region = _region(to)
        self._sources = [copy for copy in self._sources if not self._is_over(copy, held, region)]
        self._landings = [copy for copy in self._landings if not copy.touches(held, region)]
        self._landings.append(Copy(ticket, held, region, held.raw[region].copy(), to))
        held.raw[region] = _IN_FLIGHT

    def _land(self) -> None:
        """Show the host what it has waited for."""
        self._sources = [copy for copy in self._sources if not self._is_over(copy)]
        for copy in [copy for copy in self._landings if self.order.knows(HOST, copy.ticket)]:
            self._landings.remove(copy)
            if (copy.memory.raw[copy.region] != _IN_FLIGHT).any():
                raise OrderError(f"the host wrote to memory into which {self.order.describe(copy.ticket)} copied")
            copy.memory.raw[copy.region] = copy.content

    def _is_over(self, copy: Copy, held: Held | None = None, region: Region = slice(0)) -> bool:
        """Compare pinned memory with what was copied from it; return whether it may be written from now on."""
        if not np.array_equal(copy.memory.raw[copy.region], copy.content):
            raise OrderError(
                f"the host overwrote pinned memory from which {self.order.describe(copy.ticket)} may not have copied yet; "
                f"seen in {place('a call')}"
            )
        return self.order.knows(HOST, copy.ticket) or (held is not None and copy.touches(held, region))

    # -- graphs -------------------------------------------------------------------------------------------------------

    @contextmanager
    def record(self, graph: Graph, *_: Any, stream: Stream, **__: Any) -> Iterator[None]:
        """Take the place of torch.cuda.graph."""
        self.synchronize()
        with use_stream(stream):
            _here.graph = graph
            try:
                yield
            finally:
                _here.graph = None
        self.num_graphs += 1
        for held, before in graph.saved.items():
            held.raw[:] = before
        for held in graph.made:
            if not held.storage.expired():
                held.raw[:] = _UNWRITTEN

    def launch_kernel(self, name: str, compute: Callable[[], list[Access]]) -> None:
        """Run a kernel that finds out what it accesses, unless it is recorded."""
        what, graph = place(name), recorded()
        with self.lock:
            if graph is None:
                self.note(what, compute())
            else:
                graph.works.append((what, compute))


# -- what torch calls ------------------------------------------------------------------------------------------------


_active: FakeDevice | None = None


def active() -> FakeDevice:
    """Return the device that is made up now."""
    assert _active is not None, "no device is made up"
    return _active


def current_stream(*_: Any) -> Stream:
    """Take the place of torch.cuda.current_stream."""
    return getattr(_here, "stream", None) or active().default_stream


def recorded() -> Graph | None:
    """Return the graph that this thread records."""
    return getattr(_here, "graph", None)


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Take the place of torch.cuda.stream."""
    before, _here.stream = getattr(_here, "stream", None), stream
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def away() -> Iterator[None]:
    """Keep this thread's calls from the device's eyes: they are the device's."""
    before, _here.is_away = getattr(_here, "is_away", False), True
    try:
        yield
    finally:
        _here.is_away = before


class Operators(TorchDispatchMode):
    """Sees every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Have the device compute."""
        if getattr(_here, "is_away", False):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return active().operate(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    """Sees every call that names a device, or leaves torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Place tensors where the call says."""
        kwargs = kwargs or {}
        if getattr(_here, "is_away", False):
            return func(*args, **kwargs)
        call = _CALLS.get(func)
        if call is not None:
            return call(active(), *args, **kwargs)
        if "device" in kwargs or "pin_memory" in kwargs:
            return _make(active(), func, args, kwargs)
        return func(*args, **kwargs)


def _make(device: FakeDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Make a tensor where it is wanted."""
    wanted, is_pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
    if wanted is None and not is_pinned:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    if wanted is not None and torch.device(wanted).type not in ("cuda", "cpu"):
        return func(*args, device=wanted, **kwargs)  # type: ignore[no-any-return]
    with device.lock, away():
        name = func.__name__
        sources = {each.untyped_storage()._cdata for each in _flat(args)}
        # By name, because torch.device(...) may be a scope of other calls.
        made: Tensor = func(*args, **kwargs, **({} if wanted is None else {"device": "cpu"}))
        if made.untyped_storage()._cdata in sources:  # as_tensor
            return made
        if is_pinned:
            return device.adopt_pinned(made)
        if torch.device(wanted).type == "cuda":
            if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
                device.forbid_in_recording("a copy between host and device")
            what = place(name)
            held = device.adopt(made, what, is_filled=name not in _FILL_NOTHING)
            if name not in _FILL_NOTHING:
                _fill(device, what, made, held)
        return made


def _fill(device: FakeDevice, what: str, made: Tensor, held: Held) -> None:
    """Note that a new tensor is filled; a graph does that again."""
    graph, content = recorded(), held.raw.copy()

    def again() -> list[Access]:
        held.raw[:] = content
        return [Access(held, _region(made), True)]

    device.note(what, again())
    if graph is not None:
        graph.works.append((what, again))


def _to(device: FakeDevice, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
    """Take the place of Tensor.to."""
    if args and isinstance(args[0], Tensor):
        args = (_device_of(device, args[0]), args[0].dtype, *args[1:])
    copies = kwargs.pop("copy", False)
    wanted, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if wanted is not None and wanted.type not in ("cuda", "cpu"):
        return x.to(*args, **kwargs)
    same = wanted is None or wanted.type == _device_of(device, x).type
    if same or not device.is_on_device(x):
        x = x.to(dtype=dtype or x.dtype, copy=copies and same, memory_format=layout or torch.preserve_format)
    else:
        x = x.to(dtype or x.dtype)
    if same:
        return x
    assert wanted is not None
    with device.lock, away():
        made = torch.empty_like(x)
        if wanted.type == "cuda":
            device.adopt(made, place("to"), is_filled=False)
        return device.transfer(made, x, is_waited=not non_blocking)


def _pin(device: FakeDevice, x: Tensor, *_: Any) -> Tensor:
    if _is_pinned(device, x):
        return x
    device.host_touches("pin_memory", x, is_write=False)
    with away():
        return device.adopt_pinned(x.clone())


def _is_pinned(device: FakeDevice, x: Tensor, *_: Any) -> bool:
    held = device.find(x)
    return held is not None and held.is_pinned


def _record_stream(x: Tensor, stream: Stream) -> None:
    active().record_stream(x, stream)


def _device_of(device: FakeDevice, x: Tensor, *_: Any) -> torch.device:
    return CUDA if device.is_on_device(x) else x.device


def _to_list(device: FakeDevice, x: Tensor) -> Any:
    x = _to(device, x, "cpu")
    device.host_touches("tolist", x, is_write=False)
    with away():
        return x.tolist()


def _numpy(device: FakeDevice, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if device.is_on_device(x):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    with away():
        return x.numpy(*args, **kwargs)


_CALLS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device.__get__: _device_of,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device, x, *_: device.is_on_device(x),  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device, x, *_: not device.is_on_device(x),  # type: ignore[attr-defined]
    torch.Tensor.to: _to,
    torch.Tensor.cuda: lambda device, x, *_, **options: _to(device, x, CUDA, **options),
    torch.Tensor.cpu: lambda device, x, *_, **options: _to(device, x, "cpu"),
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.tolist: _to_list,
    torch.Tensor.numpy: _numpy,
}


def _tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[bool, Tensor]]:
    """Yield an operator's tensors, and whether it writes to them."""
    by_place, by_name = _writes(func)
    for is_write, value in (*zip(by_place, args, strict=False), *((by_name[name], kwargs[name]) for name in kwargs)):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor):
                yield is_write, each


@cache
def _writes(func: Any) -> tuple[list[bool], dict[str, bool]]:
    """Return whether an operator writes to its arguments."""
    arguments = func._schema.arguments
    writes = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    return writes, {each.name: is_write for each, is_write in zip(arguments, writes, strict=True)}


def _flat(out: Any) -> list[Tensor]:
    outs = out if isinstance(out, (list, tuple)) else (out,)
    return [each for each in outs if isinstance(each, Tensor)]


def _refuse_two_devices(name: str, tensors: list[tuple[bool, Tensor]], held: Sequence[Held | None]) -> None:
    for (_, tensor), each in zip(tensors, held, strict=True):
        is_index = name in ("index", "index_put_") and tensor.dtype in (torch.int64, torch.bool)
        if (each is None or each.is_pinned) and tensor.dim() and not is_index:
            raise RuntimeError(f"{place(name)}: Expected all tensors to be on the same device")


def _has_mask(name: str, args: Any) -> bool:
    """Return whether an index is a mask, of which the host wants to know the length."""
    is_index = name in ("index", "index_put_")
    return is_index and any(each is not None and each.dtype == torch.bool for each in args[1])


def _rows(name: str, args: Any) -> tuple[int, Tensor] | None:
    """Return the dimension and the places in it that an operator accesses of its first tensor."""
    if name in ("index_select", "index_copy_", "index_copy"):
        return args[1], args[2]
    if name in ("index", "index_put_"):
        first = args[1][0]
        if first is not None and first.dtype != torch.bool:
            return 0, first  # further indices are of fewer bytes
    return (0, args[1]) if name == "embedding" else None


def _region(tensor: Tensor, dim: int = -1, index: Tensor | None = None) -> Region:
    """Return the bytes of a tensor in its memory."""
    item = tensor.element_size()
    if index is None and tensor.is_contiguous():
        begin = tensor.storage_offset() * item
        return slice(begin, begin + tensor.numel() * item)
    at: NDArray[np.int64] = np.array(tensor.storage_offset())
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if index is not None and axis == dim % tensor.dim():
            steps = index.detach().numpy().reshape(-1) % size
        else:
            steps = np.arange(size if stride else min(size, 1))
        at = at[..., None] + steps * stride
    return (at.reshape(-1, 1) * item + np.arange(item)).reshape(-1)


def _bounds(region: Region) -> tuple[int, int]:
    if isinstance(region, slice):
        return region.start, region.stop
    return (int(region.min()), int(region.max()) + 1) if len(region) else (0, 0)


def _replacements(device: FakeDevice) -> dict[str, Any]:
    """Return what takes the place of torch.cuda's attributes, a different one for each: torch's compiler tells them apart."""
    about = SimpleNamespace(
        name="made of a CPU", total_memory=_TOTAL, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=4
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
        "cudart": SimpleNamespace(cudaHostRegister=device.register, cudaHostUnregister=device.unregister),
        "device": nullcontext(),
    }
    nothings = ("empty_cache", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction")
    return {
        **{name: _returning(value) for name, value in constants.items()},
        **{name: _returning(None) for name in nothings},
        "Event": Event, "Stream": Stream, "CUDAGraph": Graph, "current_stream": current_stream, "stream": use_stream,
        "graph": device.record, "synchronize": lambda *_: device.synchronize(),
        "is_current_stream_capturing": lambda: recorded() is not None,
    }  # fmt: skip


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def fake_device(dropped: str | None = None) -> Iterator[FakeDevice]:
    """Make up a device for this thread."""
    global _active  # noqa: PLW0603 - torch has one, too
    device = FakeDevice(dropped)
    with ExitStack() as stack:
        for name, value in _replacements(device).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # Which torch does not ask its modes about.
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _record_stream))
        before, _active = _active, device
        try:
            with watched():
                yield device
        finally:
            _active = before


@contextmanager
def watched() -> Iterator[None]:
    """Have the device see this thread's calls."""
    with Calls(), Operators():
        yield
