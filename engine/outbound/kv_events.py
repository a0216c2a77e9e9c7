"""Publishes what the prefix cache holds, on vLLM's wire for KV events: three frames over a ZeroMQ PUB socket.

    topic | sequence number, 8 bytes, big-endian | msgpack [time, [event, ...], rank]

An event is a map with a "type": BlockStored, BlockRemoved or AllBlocksCleared. The engine's thread puts the changes of a
step into a bounded queue and never waits; a thread of this file encodes and sends them. What the queue has no room for
is lost, and takes sequence numbers, so consumers see a gap; AllBlocksCleared and all that is cached follow. A new
subscriber, and one whose gap is older than the buffer of the replay socket, get the same, so a router may start late.
Imported only if --kv-events-config enables events: needs pyzmq and msgspec.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import zmq

from engine.core.errors import ConfigError
from engine.outbound.contents import BlockLocation, Change, Changes, Content, Snapshot
from engine.settings.kv_events_config import FLAG, KVEventsConfig

log = logging.getLogger("quire.engine")

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number after the last replayed message
_MAX_BLOCKS, _MAX_TOKENS = 1024, 1 << 18  # of a message; consumers limit its size
_MAX_ASKED_BYTES = 4096  # of a subscription or a replay's request; ZeroMQ cuts the connection of a longer one
_FAULT_S = 0.1  # after an error, before the next turn
_SNAPSHOT_GAP_S = 1.0  # between two snapshots that subscribers and replays ask for
_encode = msgspec.msgpack.Encoder().encode

Event = dict[str, Any]


def block_hash(name: bytes) -> int:
    """Return the 64 bits by which consumers know a block."""
    return int.from_bytes(name[:8], "big")


class EventWriter:
    """Makes events of changes: blocks that follow one another in one event.

    `has_groups` adds the fields of groups of layers.
    """

    def __init__(self, block_size: int, *, has_groups: bool = False) -> None:
        self._block_size, self._has_groups = block_size, has_groups
        self._limit = max(min(_MAX_BLOCKS, _MAX_TOKENS // block_size), 1)

    def payloads(self, changes: Changes, now_s: float) -> Iterator[bytes]:
        """Yield the messages for the changes of a step."""
        events: list[Event] = []
        num_blocks = 0
        for event in self._events(changes):
            size = len(event.get("block_hashes", ()))
            if events and num_blocks + size > self._limit:
                yield _encode([now_s, events, 0])
                events, num_blocks = [], 0
            events.append(event)
            num_blocks += size
        if events:
            yield _encode([now_s, events, 0])

    def _events(self, changes: Changes) -> Iterator[Event]:
        run: list[Change] = []
        for change in changes:
            if isinstance(change, Snapshot):
                yield from self._of_run(run)
                run = []
                yield {"type": "AllBlocksCleared"}
                for place, contents in change.contents:
                    for chain in _chains(contents, self._limit):
                        yield self._stored(place, chain)
            else:
                if run and (len(run) == self._limit or not _continues(run[-1], change)):
                    yield from self._of_run(run)
                    run = []
                run.append(change)
        yield from self._of_run(run)

    def _of_run(self, run: list[Change]) -> Iterator[Event]:
        if not run:
            return
        contents = [change.content for change in run]
        yield self._stored(run[0].place, contents) if run[0].is_gain else self._removed(run[0].place, contents)

    def _stored(self, place: BlockLocation, contents: list[Content]) -> Event:
        first = contents[0]
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [block_hash(content.name) for content in contents],
            "parent_block_hash": None if first.parent is None else block_hash(first.parent),
            "token_ids": [token for content in contents for token in content.tokens],
            "block_size": self._block_size,
            "lora_id": first.origin.adapter_id,
            "medium": place.medium,
            "lora_name": first.origin.adapter or None,
        }
        if any(content.extra for content in contents):
            event["extra_keys"] = [content.extra or None for content in contents]
        if self._has_groups:
            event["group_idx"] = place.group
            kind = "sliding_window" if place.window else "full_attention"
            event["kv_cache_spec_kind"] = "mamba" if place.is_state else kind
            if place.window:
                event["kv_cache_spec_sliding_window"] = place.window
        return event

    def _removed(self, place: BlockLocation, contents: list[Content]) -> Event:
        hashes = [block_hash(content.name) for content in contents]
        event: Event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": place.medium}
        return event | {"group_idx": place.group} if self._has_groups else event


def _continues(last: Change, change: Change) -> bool:
    """Return whether one event may hold two changes."""
    if change.is_gain != last.is_gain or change.place != last.place:
        return False
    return not change.is_gain or change.content.parent == last.content.name


def _chains(contents: list[Content], limit: int) -> Iterator[list[Content]]:
    """Yield all contents in runs of blocks that follow one another, parents before children."""
    after: dict[bytes | None, list[Content]] = {}
    names = {content.name for content in contents}
    for content in contents:
        after.setdefault(content.parent if content.parent in names else None, []).append(content)
    heads = after.pop(None, [])
    while heads:
        run = [heads.pop()]
        while followers := after.pop(run[-1].name, []):
            heads += followers[1:]
            if len(run) == limit:
                heads.append(followers[0])
                break
            run.append(followers[0])
        yield run


class _Step(NamedTuple):
    """The changes of a step, and how many steps before it were lost."""

    time_s: float
    changes: Changes
    num_lost: int


class KVEvents:
    """The queue between the engine's thread and the publisher's, and that thread."""

    def __init__(
        self,
        config: KVEventsConfig,
        block_size: int,
        *,
        has_groups: bool = False,
        snapshot_gap_s: float = _SNAPSHOT_GAP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the sockets. Raises ConfigError."""
        self.ask_snapshot: Callable[[], object] = lambda: None  # lets the engine's thread send a snapshot
        self._writer = EventWriter(block_size, has_groups=has_groups)
        self._snapshot_gap_s, self._clock = snapshot_gap_s, clock
        self._queue: deque[_Step] = deque()
        self._num_lost = 0  # since the last step that was queued; engine thread
        self._wants_snapshot = False
        self._next_snapshot_s = 0.0
        self._is_closing = False
        self._next_seq = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._wake, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        self._context = zmq.Context()
        self._pub = self._open(zmq.XPUB, "endpoint", config.endpoint, config.hwm)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscriber, also of a topic that has one
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            limit = max(config.hwm, config.buffer_steps + 1)
            self._replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, limit)
        self.config = replace(  # as it is published: with the ports that the system chose
            config,
            enable_kv_cache_events=True,
            endpoint=self._pub.getsockopt_string(zmq.LAST_ENDPOINT),
            replay_endpoint=None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT),
        )
        self._thread = threading.Thread(target=self._main, name="quire-kv-events", daemon=True)

    def _open(self, kind: int, key: str, address: str, hwm: int) -> zmq.Socket[bytes]:
        """Return a socket bound to an address of this machine, or connected to another machine's."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(hwm)
        socket.maxmsgsize = _MAX_ASKED_BYTES
        if address.startswith("tcp://["):
            socket.ipv6 = True
        try:
            host = address.removeprefix("tcp://").rpartition(":")[0]
            if key == "endpoint" and address.startswith("tcp://") and host != "localhost" and _is_name(host):
                socket.connect(address)
            else:
                socket.bind(address.replace("//localhost:", "//127.0.0.1:"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{FLAG}: {key} is {address!r}, which cannot be used: {error.strerror}.") from None
        return socket

    # -- engine thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the publisher's thread."""
        self._thread.start()

    def put(self, changes: Changes) -> None:
        """Queue the changes of a step, or lose them where there is no room. Never waits."""
        if len(self._queue) >= self.config.max_queue_size:
            self._num_lost += 1
            return
        self._queue.append(_Step(time.time(), changes, self._num_lost))
        self._num_lost = 0
        self._notify()

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._is_closing = True
        self._notify()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=200)
        os.close(self._wakes)
        os.close(self._wake)

    def _notify(self) -> None:
        with suppress(BlockingIOError):  # then the thread is going to wake up anyway
            os.write(self._wakes, b"1")

    # -- the publisher's thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            is_last = self._is_closing
            try:
                self._turn()
                if not is_last:
                    poller.poll(self._patience_ms())
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
            except Exception as error:  # any: the next message may be sent
                log.error("KV events: a message was lost: %s: %s", type(error).__name__, error)  # noqa: TRY400 - one line
                time.sleep(_FAULT_S)
            if is_last:
                return

    def _turn(self) -> None:
        """Send what is queued, then serve one subscription and one replay: a flood of them delays neither steps nor the end."""
        while self._queue:
            step = self._queue.popleft()
            if step.num_lost:
                self._next_seq += step.num_lost
                self._wants_snapshot = True
            for payload in self._writer.payloads(step.changes, step.time_s):
                self._send(payload)
        self._wants_snapshot = self._wants_snapshot or self._num_lost > 0
        if self._pub.poll(0):
            self._wants_snapshot = self._pub.recv()[:1] == b"\x01" or self._wants_snapshot
        if self._replay is not None and self._replay.poll(0):
            self._answer(self._replay)
        if self._wants_snapshot and self._clock() >= self._next_snapshot_s:
            self._wants_snapshot = False
            self._next_snapshot_s = self._clock() + self._snapshot_gap_s
            self.ask_snapshot()

    def _patience_ms(self) -> int | None:
        if not self._wants_snapshot:
            return None
        return max(int((self._next_snapshot_s - self._clock()) * 1000) + 1, 0)

    def _send(self, payload: bytes) -> None:
        number = self._next_seq
        self._next_seq += 1
        self._kept.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept messages from the number that a consumer asks for, and the end marker."""
        client, *_, asked = replay.recv_multipart()
        first = int.from_bytes(asked, "big")
        if first < (self._kept[0][0] if self._kept else self._next_seq):
            self._wants_snapshot = True  # some of what is asked for is gone
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", self._topic, END, b""))


def _is_name(host: str) -> bool:
    """Return whether an address names another machine: vLLM connects to names, and binds the rest."""
    return not (host == "*" or host.startswith("[") or host.replace(".", "").isdigit())
