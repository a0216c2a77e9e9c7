"""Records the history of a scheduler for `quire simulate replay`.

A recording is a text file of one JSON object a line: a header, then every request, plan, commit, abort and rollback in
order, with the clock readings that the scheduler was given. It contains no text, no key and no name: ids of requests,
tenants, salts and adapters are replaced by numbers, and token ids are hidden.

Plans depend on token ids in two ways: the prefix cache compares full blocks, and some ids end an answer. So a hidden id
is 0, except the last one of a full block, which is a number that stands for all tokens up to there, and an ending one.
The numbers are digests with a key that is not written: they say which prefixes of blocks are equal, and nothing else.

The engine thread puts references into a bounded queue; a writer thread makes lines of them. If the writer falls behind
or cannot write, the recording ends there and the daemon goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any
from zlib import crc32

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.rows import Rows, SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import Stats
from engine.core.step import StepPlan, StepResult
from engine.core.types import AbortCause, PoolingParams, Request, SamplingParams, StepEvents, TokenEvent
from engine.system.version import VERSION

log = logging.getLogger("quire.engine")

FORMAT = 4
REQUEST_FIELDS = ("priority", "deadline_s", "max_queue_s", "is_background", "weight", "turn_end")
PARAM_FIELDS = ("max_tokens", "n", "min_tokens", "prompt_logprobs")
MAX_BYTES = 1 << 28  # of a file
_MAX_QUEUED = 4000  # entries, two a step: some 40 MB where 256 sequences run
_STOPPED = "the daemon stopped"

Entry = tuple[Any, ...]  # the name of a line's kind, and what it is made of
Note = Callable[[Entry], None]


def describe(plan: StepPlan) -> dict[str, Any]:
    """Return a plan's sizes, its chunks of prompts by row, and a digest of the rest."""
    sizes = {
        "decodes": len(plan.slots),
        "chunks": [list(chunk[:3]) for chunk in plan.chunks],
        "drafts": sum(num for _, num in plan.drafts),
        "copies": len(plan.copies),
        "swap_out": len(plan.swap_out),
        "swap_in": len(plan.swap_in),
    }
    return {"step": plan.step_id, **_without_empty(sizes), "digest": f"{crc32(plan.numbers().tobytes()):08x}"}


class RecordingScheduler(Scheduler):
    """A scheduler that notes what it is asked and what it plans."""

    def __init__(self, config: SchedulerConfig, note: Note, stats: Stats | None = None) -> None:
        super().__init__(config, stats)
        self._note = note

    def add(self, request: Request) -> None:
        super().add(request)
        self._note(("add", request))

    def drop_hopeless(self, now: float) -> list[TokenEvent]:
        events = super().drop_hopeless(now)
        if events:
            self._note(("drop", now))
        return events

    def abort(self, request_id: str, cause: AbortCause, now: float, choice: int | None = None) -> list[TokenEvent]:
        self._note(("abort", now, request_id, cause, choice))
        return super().abort(request_id, cause, now, choice)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._note(("plan", now, plan, [*self.missing.digests]))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        self._note(("commit", now, result, plan.step_id != self._in_flight[0].step_id))
        return super().commit(plan, result, now)

    def roll_back(self, now: float, failure: str | None = None) -> list[TokenEvent]:
        self._note(("roll_back", now, failure is not None))
        return super().roll_back(now, failure)

    def give_up_copies(self) -> None:
        self._note(("give_up_copies",))
        super().give_up_copies()


class Journal:
    """Makes the lines of a recording, in order."""

    def __init__(self, config: SchedulerConfig, version: str = VERSION) -> None:
        self.header = {"quire_recording": FORMAT, "version": version, "scheduler": asdict(config)}
        self._hidden = HiddenIds(config.block_size)
        self._numbers: dict[str, dict[Hashable, int]] = defaultdict(dict)  # by kind of name; "" and None are 0
        self._rows = Rows()
        self._launched: deque[list[SequenceSlice]] = deque()

    def line(self, entry: Entry) -> dict[str, Any]:
        """Return what is written of an entry."""
        kind, *details = entry
        written: dict[str, Any] = getattr(self, f"_{kind}")(*details)
        return {"op": kind, **written}

    def _add(self, request: Request) -> dict[str, Any]:
        params = request.params
        eos, stop = params.eos_token_ids, params.stop_token_ids - params.eos_token_ids
        line = {
            "id": self._number("request", request.request_id),
            "at": request.arrival_s,
            "prompt": self._hidden.prompt(request.prompt),
            "eos": [*range(-len(eos), 0)],
            "stop": [*range(-len(eos) - len(stop), -len(eos))],
            "salt": self._number("salt", request.cache_salt),
            "owner": self._number("owner", request.cache_owner),
            "tenant": self._number("tenant", request.tenant),
            "adapter": self._number("adapter", None if params.adapter is None else params.adapter.digest),
            "pins": [list(pin) for pin in request.pins],
            "spans": [
                [span.start, span.length, self._number("span", span.digest), span.is_atomic] for span in request.spans
            ],
            "pooling": params.pooling.value if isinstance(params, PoolingParams) else None,
        }
        if params.beam is not None:
            early = params.beam.early_stopping.value
            line |= {"beam": [params.beam.width, params.beam.length_penalty, early], "logprobs": params.logprobs}
        kept = changed_fields(request, REQUEST_FIELDS)
        if isinstance(params, SamplingParams):
            kept |= changed_fields(params, PARAM_FIELDS)
        return _without_empty(line) | kept

    def _drop(self, now: float) -> dict[str, Any]:
        return {"at": now}

    def _abort(self, now: float, request_id: str, cause: AbortCause, choice: int | None) -> dict[str, Any]:
        line = {"at": now, "id": self._number("request", request_id), "cause": cause.value}
        return line if choice is None else {**line, "choice": choice}

    def _plan(self, now: float, plan: StepPlan | None, missing: Sequence[bytes]) -> dict[str, Any]:
        line = {"at": now} | _without_empty({"missing": [self._number("span", digest) for digest in missing]})
        if plan is None:
            return line
        self._launched.append(self._rows.follow(plan))
        return line | describe(plan)

    def _commit(self, now: float, result: StepResult, is_newest: bool) -> dict[str, Any]:
        draws: list[Any] = []
        drafted: dict[int, Any] = {}
        tops: dict[int, Any] = {}
        slices = self._launched.pop() if is_newest else self._launched.popleft()
        for index, piece in enumerate(slices):
            depth, first = piece.start + piece.num_tokens, len(draws)
            ids = result.token_ids[first : first + len(piece.samples)]
            is_void = index in result.errors or index in result.drafted or piece.params.beam is not None
            if index in result.drafted:
                token_ids, num_drafts, _, is_end = result.drafted[index]
                drafted[index] = [self._hidden.draws(piece, piece.slot, depth, token_ids), num_drafts, is_end]
            elif index not in result.errors and piece.params.beam is not None and first in result.logprobs:
                top = result.logprobs[first].top
                tops[index] = [[*self._hidden.draws(piece, -1, depth, [token]), logprob] for token, logprob in top]
            for sample, token in zip(piece.samples, ids, strict=True):
                slot = piece.slot if sample.slot == piece.slot else -1  # of another choice
                draws += [0] if is_void else self._hidden.draws(piece, slot, depth, [token])
        self._rows.learn(slices, result)
        line = {
            "draws": draws if any(draws) else None,
            "drafted": drafted,
            "tops": tops,
            "errors": {index: fault.cause.value for index, fault in result.errors.items()},
            "ended": sorted(result.ended),
            "newest": is_newest,
        }
        return {"at": now, **_without_empty(line)}

    def _roll_back(self, now: float, failed: bool) -> dict[str, Any]:
        self._launched.clear()
        return {"at": now, "failed": failed}

    def _give_up_copies(self) -> dict[str, Any]:
        return {}

    def _number(self, kind: str, name: Hashable) -> int:
        """Return the number that stands for a name."""
        numbers = self._numbers[kind]
        return numbers.setdefault(name, len(numbers) + 1) if name else 0


class HiddenIds:
    """Hides token ids of prompts and draws; the module says how."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key = os.urandom(32)
        self._ends: dict[int, tuple[int, int, bytes]] = {}  # of a slot's last full block: seq_id, depth, digest

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt's length and the numbers of its full blocks; `shown_prompt` reverses it."""
        return [len(tokens), *(_number(digest) for digest in self._digests(tokens, b""))]

    def draws(self, piece: SequenceSlice, slot: int, depth: int, ids: Sequence[int]) -> list[int]:
        """Return the hidden ids of tokens drawn after a sequence's first `depth`.

        `slot` is the sequence's own, where the digest of its last full block is kept; -1 for an alternative, or a child.
        """
        hidden = [0] * len(ids)
        if _is_over(piece, depth):
            return hidden
        eos, stop = piece.params.eos_token_ids, piece.params.stop_token_ids
        for index, token in enumerate(ids):
            if token in eos or token in stop:  # what else it was is not recorded
                hidden[index] = -1 if token in eos else -len(eos) - 1
                break
            if (depth + index + 1) % self._block_size == 0:
                hidden[index] = _number(self._full_block(piece, slot, depth, ids[: index + 1]))
        return hidden

    def _full_block(self, piece: SequenceSlice, slot: int, depth: int, ids: Sequence[int]) -> bytes:
        """Return the digest of a sequence up to the last of `ids`, which completes a block."""
        seq_id, start, digest = self._ends.get(slot, (-1, 0, b""))
        if seq_id != piece.seq_id or start > depth:
            start, digest = 0, b""
        tokens = [*piece.tokens[start:depth], *ids]
        *_, digest = self._digests(tokens, digest)
        if slot >= 0:
            self._ends[slot] = piece.seq_id, start + len(tokens), digest
        return digest

    def _digests(self, tokens: Sequence[int], parent: bytes) -> Iterator[bytes]:
        """Yield the digests of the full blocks that follow `parent`."""
        for stop in range(self._block_size, len(tokens) + 1, self._block_size):
            block = array("q", tokens[stop - self._block_size : stop])
            parent = blake2b(parent + block.tobytes(), digest_size=16, key=self._key).digest()
            yield parent


def shown_prompt(hidden: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return the ids that stand for a hidden prompt."""
    length, *numbers = hidden
    tokens = [0] * length
    tokens[block_size - 1 :: block_size] = numbers
    return tuple(tokens)


def _number(digest: bytes) -> int:
    """Return a positive number of 63 bits."""
    return int.from_bytes(digest[:8], "big") >> 1 | 1


def check_path(path: Path) -> None:
    """Raise ConfigError for a file that could not be written."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--record is {str(path)!r}, which cannot be written; name a file in a folder that is there.")


class RecordingFile:
    """A file, and the thread that writes it."""

    def __init__(self, path: Path, config: SchedulerConfig) -> None:
        """Open the file, which only its owner may read. Raises ConfigError."""
        self._journal = Journal(config)
        try:
            # A FIFO that nothing reads would block.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
            os.set_blocking(descriptor, True)
            self._file = os.fdopen(descriptor, "w", encoding="ascii")
            os.fchmod(descriptor, 0o600)  # it may have been there
        except OSError as error:
            raise ConfigError(f"--record is {str(path)!r}, which cannot be written: {error.strerror}.") from None
        self._path = path
        self._queue: Queue[Entry | None] = Queue(_MAX_QUEUED)
        self._num_bytes = 0
        self._end = ""  # why nothing more is written
        self._thread = threading.Thread(target=self._main, name="quire-recording", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """Queue an entry; never blocks. Engine thread."""
        if not self._end:
            try:
                self._queue.put_nowait(entry)
            except Full:
                self._end = "the writer fell behind"

    def close(self) -> None:
        """Write what is queued, and end the file."""
        self._end = self._end or _STOPPED
        with suppress(Full):  # then the writer is not waiting for an entry
            self._queue.put_nowait(None)
        self._thread.join()

    def _main(self) -> None:
        with suppress(OSError), self._file:  # the last lines may find no room
            try:
                self._write_entries()
            except OSError as error:
                self._end = f"{type(error).__name__}: {error}"
            if self._end != _STOPPED:
                log.warning("The recording in %s ends here: %s", self._path, self._end)
            self._write({"op": "end", "why": self._end})

    def _write_entries(self) -> None:
        self._write(self._journal.header)
        while (entry := self._next()) is not None:
            self._write(self._journal.line(entry))
            if self._num_bytes > MAX_BYTES:
                self._end = f"the file is larger than {MAX_BYTES >> 20} MiB"
                return

    def _next(self) -> Entry | None:
        """Return the next entry, or None at the end; flushes the file before it waits."""
        has_ended = bool(self._end)  # read first: nothing is queued once it is set
        try:
            return self._queue.get_nowait()
        except Empty:
            if has_ended:
                return None
            self._file.flush()
            return self._queue.get()

    def _write(self, line: dict[str, Any]) -> None:
        self._num_bytes += self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _is_over(piece: SequenceSlice, depth: int) -> bool:
    """Return True if a sequence ended before it had `depth` tokens.

    Its step was in flight then, and the token drawn in it does not count.
    """
    tokens, params = piece.tokens, piece.params
    if len(tokens) < depth or depth <= piece.num_prompt:
        return len(tokens) < depth
    last = tokens[depth - 1]
    return last in params.eos_token_ids or last in params.stop_token_ids


def changed_fields(record: Request | SamplingParams, names: Sequence[str]) -> dict[str, Any]:
    """Return those of some fields that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(record)}
    return {name: getattr(record, name) for name in names if getattr(record, name) != defaults[name]}


def _without_empty(line: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None, 0 or empty."""
    return {name: value for name, value in line.items() if value not in (None, 0, "") and value != [] and value != {}}
