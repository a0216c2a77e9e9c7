"""KV events: an index fed by them equals the prefix cache, after any history and any loss of messages."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from engine.core.errors import ConfigError
from engine.core.kv.prefix_cache import BlockIndex, chain_next, chain_root, in_group
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import AbortCause, StepEvents
from engine.handle import EngineFacts
from engine.loop import Engine, Outbound
from engine.outbound.contents import Contents, group_of
from engine.outbound.kv_events import END, KVEvents, block_hash
from engine.settings.engine_config import EngineConfig
from engine.settings.kv_events_config import KVEventsConfig
from loadtest.fake_runner import FakeRunner
from tests.patience import PATIENCE_S
from tests.pure.driver import VOCAB, Driver, config, request
from tests.pure.test_scheduler_properties import SchedulerMachine

Held = dict[tuple[str, int], dict[int, dict]]


class Index:
    """What a router knows from the messages it got."""

    def __init__(self) -> None:
        self.last = -1
        self.held: Held = {}
        self.kinds: dict[int, tuple[str | None, int | None]] = {}  # by group

    def take(self, number: int, payload: bytes) -> None:
        """Apply a message, the next one."""
        self.last = number
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.held.clear()
                continue
            held = self.held.setdefault((event["medium"], event.get("group_idx", 0)), {})
            if event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del held[block]
                continue
            kind = event.get("kv_cache_spec_kind"), event.get("kv_cache_spec_sliding_window")
            assert self.kinds.setdefault(event.get("group_idx", 0), kind) == kind
            size, parent = event["block_size"], event["parent_block_hash"]
            assert len(event["token_ids"]) == size * len(event["block_hashes"])
            for index, block in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][index * size : (index + 1) * size]
                extra = (event.get("extra_keys") or [None] * len(event["block_hashes"]))[index]
                assert block not in held, "stored twice"
                held[block] = {"parent": parent, "tokens": tokens, "extra": extra}
                parent = block


class QuietEvents(KVEvents):
    """Without a thread: messages are sent when the test says so, and kept for it."""

    def __init__(self, settings: KVEventsConfig, block_size: int, *, has_groups: bool) -> None:
        super().__init__(settings, block_size, has_groups=has_groups, snapshot_gap_s=0.0)
        self.sent: list[tuple[int, bytes]] = []

    def _send(self, payload: bytes) -> None:
        super()._send(payload)
        self.sent.append(self._kept[-1])

    def turn(self) -> None:
        """Send what is queued, and the snapshot if one is wanted."""
        self._turn()
        self._turn()

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return what the replay socket answers."""
        socket = RecordedSocket([b"client", b"", first.to_bytes(8, "big")])
        self._answer(socket)  # type: ignore[arg-type]
        *frames, last = socket.sent
        assert last == (b"client", b"", b"top", END, b"")
        assert all(frame[:3] == (b"client", b"", b"top") for frame in frames)
        return [(int.from_bytes(frame[3], "big"), frame[4]) for frame in frames]


class RecordedSocket:
    """A ROUTER socket with one request."""

    def __init__(self, asked: list[bytes]) -> None:
        self._asked = asked
        self.sent: list[tuple[bytes, ...]] = []

    def recv_multipart(self) -> list[bytes]:
        return self._asked

    def send_multipart(self, frames: tuple[bytes, ...]) -> None:
        self.sent.append(frames)


class EventsMachine(SchedulerMachine):
    """The histories of test_scheduler_properties.py, with a router that loses messages."""

    @initialize(
        depth=st.integers(0, 3),
        num_blocks=st.integers(10, 24),
        num_host_blocks=st.sampled_from([0, 3, 12, 60]),
        host_caching=st.booleans(),
        num_disk_blocks=st.sampled_from([0, 5, 40]),
        window=st.sampled_from([0, 0, 0, 5]),
        state_blocks=st.sampled_from([0, 0, 1, 2]),
        max_queue_size=st.sampled_from([1, 2, 1000]),
        buffer_steps=st.sampled_from([1, 3, 1000]),
    )
    def start(  # type: ignore[override]
        self, depth: int, window: int, max_queue_size: int, buffer_steps: int, **changes: str | int
    ) -> None:
        sizes: dict = {"max_num_batched_tokens": 20, "max_model_len": 40, **changes}
        sizes["num_disk_blocks"] = sizes["num_disk_blocks"] if sizes["host_caching"] else 0
        if window:
            sizes["windows"] = (window,)
        sizes["num_blocks"] += 6 * (bool(window) + sizes["state_blocks"])
        self.driver = Driver(config(**sizes), depth)
        self.aborted: set[str] = set()
        asked = {"topic": "top", "max_queue_size": max_queue_size, "buffer_steps": buffer_steps}
        self.events = QuietEvents(
            KVEventsConfig(endpoint="inproc://events", **asked),  # type: ignore[arg-type]
            self.driver.scheduler.config.block_size,
            has_groups=len(self.driver.scheduler.config.groups) > 1,
        )
        self.contents = Contents(self.driver.scheduler.kv, self.events.put)
        self.events.ask_snapshot = self.contents.send_snapshot
        self.index = Index()

    @invariant()
    def changes_are_passed_on(self) -> None:
        if hasattr(self, "driver"):
            self.contents.flush()

    @rule(losses=st.lists(st.booleans(), min_size=1, max_size=4))
    def publish(self, losses: list[bool]) -> None:
        """The publisher's thread gets a turn; the network loses some of what it sends."""
        self.events.turn()
        sent, self.events.sent = self.events.sent, []
        for at, (number, payload) in enumerate(sent):
            if not losses[at % len(losses)]:
                self.receive(number, payload)

    def receive(self, number: int, payload: bytes) -> None:
        if number > self.index.last + 1:
            self.catch_up()
        if number == self.index.last + 1:
            self.index.take(number, payload)

    def catch_up(self) -> None:
        """Ask for what was missed. What is too old is healed by the snapshot that follows."""
        for number, payload in self.events.replay(self.index.last + 1):
            is_next = number == self.index.last + 1
            if is_next or (number > self.index.last and begins_anew(payload)):
                self.index.take(number, payload)

    @rule()
    def compare(self) -> None:
        """Once a router has asked for what it missed, it knows what is cached, where."""
        self.events.turn()
        self.catch_up()
        self.events.turn()
        self.catch_up()
        kv, contents = self.driver.scheduler.kv, self.contents
        unseen = {name for each in (contents.host, *contents.stores.values()) for name in each._unseen}
        names = {block_hash(name): name for name in kv._cache._block_of}
        expected: dict[tuple[str, int], set[int]] = {("GPU", 0): set(names)}
        for index, group in enumerate(kv._others, start=1):
            expected["GPU", index] = hashes(group)
        host = kv.tiers.host
        arrived = {name for name, block in host._block_of.items() if host.has_content(name, block)}
        stored = {name for store in kv.tiers.stores.values() for name in store._block_of}
        for medium, held_names in ("CPU", arrived), ("STORAGE", stored):
            for name in held_names - unseen:  # behind a name's digest is the number of its group
                if held_names.issuperset(self.parts(name)):
                    expected.setdefault((medium, group_of(name)), set()).add(block_hash(name))
        assert {place: set(held) for place, held in self.index.held.items() if held} == {
            place: held for place, held in expected.items() if held
        }
        kinds = {"full": ("full_attention", None), "window 5": ("sliding_window", 5), "recurrent": ("mamba", None)}
        groups = self.driver.scheduler.config.groups
        assert (
            self.index.kinds.items()
            <= {
                number: kinds[group.name] if len(groups) > 1 else (None, None) for number, group in enumerate(groups)
            }.items()
        )
        for block, held in self.index.held.get(("GPU", 0), {}).items():
            if held["parent"] is None:
                assert held["extra"] or chain_next(chain_root(""), held["tokens"]) == names[block]
            elif held["parent"] in names and not held["extra"]:
                assert chain_next(names[held["parent"]], held["tokens"]) == names[block]

    def parts(self, name: bytes) -> list[bytes]:
        """The names of all blocks of a content, of which a router knows once they are all there."""
        kind = self.driver.scheduler.config.groups[group_of(name)]
        return [in_group(name[:32], group_of(name), part) for part in range(kind.num_parts)]

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            super().teardown()
            self.changes_are_passed_on()
            self.compare()
            self.events.close()


@pytest.mark.parametrize("seed", range(12))
def test_an_index_equals_the_cache_where_blocks_move_between_tiers(seed: int) -> None:
    """Longer histories than a state machine finds, with more prompts than the pool and host memory hold."""
    rng = random.Random(seed)
    machine = EventsMachine()
    machine.start(
        depth=seed % 2,
        window=5 * (seed % 4 == 3),
        state_blocks=2 * (seed % 4 == 1),
        max_queue_size=rng.choice([1, 2, 1000]),
        buffer_steps=rng.choice([1, 3, 1000]),
        num_blocks=rng.randint(10, 16),
        num_host_blocks=rng.choice([4, 12]),
        host_caching=True,
        num_disk_blocks=rng.choice([0, 6, 40]),
    )
    driver = machine.driver
    for turn in range(150):
        start = rng.randrange(8)
        prompt = tuple((5 * start + each) % 50 for each in range(rng.randint(4, 20)))
        name, owner = f"r{turn}", rng.choice(["", "", "a"])
        salt = rng.choice(["", "", "s"])
        driver.add(request(name, prompt, arrival_s=driver.now, cache_owner=owner, cache_salt=salt))
        machine.run(rng.randint(0, 6))
        machine.changes_are_passed_on()
        machine.abort(rng.randrange(turn + 1), None, AbortCause.DISCONNECT)
        if rng.random() < 0.1:
            machine.run_out_of_memory(None)
        if rng.random() < 0.5:
            machine.publish([rng.random() < 0.5 for _ in range(3)])
        if rng.random() < 0.2:
            driver.drain()
            machine.transfer(0, rng.random() < 0.8)
            machine.spill()
            machine.changes_are_passed_on()
            machine.compare()
    machine.teardown()
    media = {medium for (medium, _), held in machine.index.held.items() if held}
    tiers = driver.scheduler.config
    assert media >= {"GPU"} | ({"CPU"} if tiers.host_caching else set()) | ({"STORAGE"} if tiers.stores else set())


def begins_anew(payload: bytes) -> bool:
    """Return whether a message does not need those before it."""
    return msgspec.msgpack.decode(payload)[1][0]["type"] == "AllBlocksCleared"


def hashes(index: BlockIndex) -> set[int]:
    return {block_hash(name) for name in index._block_of}


EventsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEventsMachine = EventsMachine.TestCase


def test_what_the_queue_has_no_room_for_leaves_a_gap_and_is_healed() -> None:
    events = QuietEvents(KVEventsConfig(endpoint="inproc://full", topic="top", max_queue_size=1), 4, has_groups=False)
    contents = Contents(Scheduler(config()).kv, events.put)
    events.ask_snapshot = contents.send_snapshot
    contents.note_request(request(), [b"root"])
    for index in range(3):  # the queue holds one of them
        contents.pool.compute([b"root", *([bytes([index]) * 32] * (index + 1))], range(4 * index + 4), index, 4)
        contents.flush()
    events.turn()
    assert [number for number, _ in events.sent] == [0, 3]
    assert begins_anew(events.sent[1][1])
    events.close()


def opened(**changes: object) -> KVEvents:
    asked = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    return KVEvents(KVEventsConfig.read(asked | changes), 4, snapshot_gap_s=0.0)


Connect = Callable[[int, str | None], zmq.Socket[bytes]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with zmq.Context() as context, ExitStack() as stack:

        def connected(kind: int, address: str | None) -> zmq.Socket[bytes]:
            made = stack.enter_context(context.socket(kind))
            made.linger = 0
            made.rcvtimeo = int(PATIENCE_S * 1000)
            if kind == zmq.SUB:
                made.subscribe(b"")
            made.connect(str(address))
            return made

        yield connected


def test_a_router_that_starts_late_learns_what_is_cached(connect: Connect) -> None:
    sizes = config()
    events = opened(topic="kv@me@m")
    scheduler = Scheduler(sizes)
    engine = Engine(
        scheduler, FakeRunner(sizes, vocab_size=VOCAB), EngineFacts(VOCAB), outbound=Outbound(kv_events=events)
    )
    told: list[StepEvents] = []
    engine.start(told.append)
    try:
        subscriber = connect(zmq.SUB, events.config.endpoint)
        topic, number, payload = subscriber.recv_multipart()  # whatever there is: nothing
        assert topic == b"kv@me@m"
        index = Index()
        index.take(int.from_bytes(number, "big"), payload)
        assert not index.held
        engine.submit(request("a", tuple(range(17)), max_tokens=1, eos_token_ids=frozenset()))
        while len(index.held.get(("GPU", 0), ())) < 4:
            _, number, payload = subscriber.recv_multipart()
            assert int.from_bytes(number, "big") == index.last + 1
            index.take(int.from_bytes(number, "big"), payload)
        late = Index()
        other = connect(zmq.SUB, events.config.endpoint)
        _, number, payload = other.recv_multipart()
        late.take(int.from_bytes(number, "big"), payload)
        assert late.held == index.held
        asking = connect(zmq.DEALER, events.config.replay_endpoint)
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        replayed = Index()
        while (frames := asking.recv_multipart())[2] != END:
            assert frames[:2] == [b"", b"kv@me@m"]
            if int.from_bytes(frames[2], "big") <= late.last:
                replayed.take(int.from_bytes(frames[2], "big"), frames[3])
        assert replayed.held == index.held
        assert frames == [b"", b"kv@me@m", END, b""]
    finally:
        engine.stop(0.0)


class Flooding(RecordedSocket):
    """A socket with a request each time it is looked at, as where a client sends them in a loop."""

    def poll(self, _: int) -> bool:
        assert len(self.sent) < 10, "the thread does nothing else"
        return True

    def recv(self) -> bytes:
        self.sent.append(())
        return b"\x01"


@pytest.mark.parametrize("end", ["_pub", "_replay"])
def test_a_flood_of_requests_does_not_keep_the_thread_from_its_work(end: str) -> None:
    events = QuietEvents(KVEventsConfig(endpoint="inproc://flood", topic="top"), 4, has_groups=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(events, end, Flooding([b"client", b"", bytes(8)]))
        events.turn()
    events.close()


def test_a_request_of_megabytes_is_not_taken_in(connect: Connect) -> None:
    events = opened()
    events.start()
    hostile, honest = (connect(zmq.DEALER, events.config.replay_endpoint) for _ in range(2))
    hostile.send_multipart((b"", b"x" * (1 << 20)))
    honest.send_multipart((b"", bytes(8)))
    assert honest.recv_multipart()[-2] == END
    hostile.rcvtimeo = 0
    with pytest.raises(zmq.Again):
        hostile.recv_multipart()
    events.close()


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"endpoint is 'tcp://127\.0\.0\.1:{port}', which cannot be used"):
            opened(endpoint=f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("{", "is '{', which is not JSON"),
        ({"enable_kv_cache_event": True}, "did you mean 'enable_kv_cache_events'?"),
        ({"endpoint": "127.0.0.1:5557"}, "endpoint is '127.0.0.1:5557'; it must be like tcp://127.0.0.1:5557."),
        ({"hwm": 0}, "hwm is 0; it must be at least 1."),
        ({"hwm": 1 << 31}, "hwm is 2147483648; it must be at most 1073741824."),
        ({"endpoint": "tcp://*:65536"}, "endpoint is 'tcp://*:65536'; it must be like tcp://127.0.0.1:5557."),
        ({"endpoint": "ipc:///tmp/a\0b"}, "it must be like tcp://127.0.0.1:5557."),
        ({"topic": "\ud800"}, r"topic is '\ud800'; it must have printable characters only."),
        ('{"topic":' * 100_000, "has JSON that is nested too deeply."),
        ({"buffer_steps": 1.5}, "buffer_steps is 1.5; it must be a whole number."),
        ({"publisher": "kafka"}, "publisher is 'kafka'; choose one of zmq, null."),
        ({"endpoint": Path("a")}, "endpoint is 'a'; it must be like tcp://127.0.0.1:5557."),
    ],
)
def test_a_wrong_configuration_is_refused(asked: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("--kv-events-config")) as caught:
        EngineConfig(model="m", kv_events_config=asked)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "is_on"),
    [
        (None, False),
        ({}, False),
        ({"publisher": "zmq"}, False),
        ({"enable_kv_cache_events": True}, True),
        ({"enable_kv_cache_events": True, "publisher": "null"}, False),
    ],
)
def test_events_are_published_where_vllm_publishes_them(asked: dict[str, object] | None, is_on: bool) -> None:
    assert (EngineConfig(model="m", kv_events_config=asked).kv_events is not None) == is_on


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    with pytest.raises(ConfigError, match="--kv-events-config publishes what the prefix cache holds"):
        EngineConfig(model="m", kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)


def test_the_consumer_of_the_page_follows_the_events() -> None:
    root = Path(__file__).parents[2]
    example = root / "tests/examples/kv_consumer.py"
    assert f"```python\n{example.read_text()}```" in (root / "docs/observe/kv-events.md").read_text()
    sizes = config()
    events = opened()
    engine = Engine(
        Scheduler(sizes), FakeRunner(sizes, vocab_size=VOCAB), EngineFacts(VOCAB), outbound=Outbound(kv_events=events)
    )
    engine.start(lambda _: None)
    with subprocess.Popen(
        [sys.executable, example, events.config.endpoint], stdout=subprocess.PIPE, text=True
    ) as consumer:
        try:
            assert consumer.stdout is not None
            assert consumer.stdout.readline() == "0 {}\n"
            engine.submit(request("a", tuple(range(17)), max_tokens=1, eos_token_ids=frozenset()))
            while not (line := consumer.stdout.readline()).endswith("{'GPU': 4}\n"):
                assert line, "it ended"
        finally:
            consumer.kill()
            engine.stop(0.0)
