"""Replays a recording of `quire serve --record` on FakeRunner.

The scheduler gets the recorded calls, clock readings and results, so the replay needs no model. The first plan that
differs from the recorded one ends the replay. engine/recording/recording.py describes the lines.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.stats import FailureCause, Stats
from engine.core.step import Drafted, Fault, StepPlan
from engine.core.types import (
    AbortCause,
    Adapter,
    BeamParams,
    EarlyStopping,
    Params,
    Pin,
    Pooling,
    PoolingParams,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from engine.recording.recording import FORMAT, PARAM_FIELDS, REQUEST_FIELDS, describe, shown_prompt
from engine.system.regular_file import check_regular
from loadtest.errors import LoadtestError
from loadtest.fake_runner import FakeRunner
from loadtest.simulation.replica import Gaps

_OPS = ("add", "drop", "abort", "plan", "commit", "roll_back", "give_up_copies", "end")  # methods of a Replayer


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay."""

    config: SchedulerConfig
    stats: Stats
    gaps: Gaps
    num_requests: int = 0
    num_plans: int = 0
    num_committed: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    difference: str = ""  # "" if every plan is as recorded
    end: str = ""  # why the recording ends; "" if it was cut off


def is_recording(path: Path) -> bool:
    """Return whether a file begins like a recording."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            return file.read(64).startswith(b'{"quire_recording"')
    except OSError:
        return False


def replay_recording(path: Path) -> Replayed:
    """Replay a file. Raises LoadtestError if it is damaged or of another version."""
    try:
        with path.open(encoding="utf-8") as lines:
            return replay_lines(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadtestError(f"the recording {path} cannot be read: {error}.") from None


def replay_lines(lines: Iterable[str], name: str = "it") -> Replayed:
    """Replay the lines of a recording. Raises LoadtestError."""
    numbered = enumerate(lines, 1)
    replayer = Replayer(_parse(name, *next(numbered, (1, ""))))
    for number, text in numbered:
        if not text.endswith("\n"):
            break  # the daemon was killed while it wrote
        line = _parse(name, number, text)
        try:
            replayer.take(line)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            where = f"line {number} of {name} ({line.get('op')!r})"
            raise LoadtestError(f"{where} cannot be replayed: {type(error).__name__}: {error}.") from error
        if replayer.done.difference:
            replayer.done.difference = f"line {number}: {replayer.done.difference}"
            break
    return replayer.done


def _parse(name: str, number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise LoadtestError(f"line {number} of {name} is not a JSON object; the recording is damaged.")
    return line


class Replayer:
    """Replays line after line; `done` is the outcome so far."""

    def __init__(self, header: dict[str, Any]) -> None:
        """Read the header. Raises LoadtestError if it is that of another version."""
        known = {each.name for each in fields(SchedulerConfig)}
        if header.get("quire_recording") != FORMAT or header["scheduler"].keys() != known:
            raise LoadtestError(
                f"the recording has format {header.get('quire_recording')!r} of version {header.get('version')}, which "
                f"differs from format {FORMAT} here; replay it with the version that wrote it."
            )
        config = _config(header["scheduler"])
        gaps = Gaps()
        self.done = Replayed(config, Stats(itl_s=gaps), gaps)
        self._scheduler = Scheduler(config, self.done.stats)
        self._runner = FakeRunner(config, memory=False)
        self._block_size = config.block_size
        self._launched: deque[StepPlan] = deque()

    def take(self, line: dict[str, Any]) -> None:
        """Replay a line."""
        op = line["op"]
        if op not in _OPS:
            raise ValueError(f"there is no operation {op!r}")
        getattr(self, op)(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add a request."""
        beam, prompt = None, line["prompt"]
        if "beam" in line:
            width, penalty, early = line["beam"]
            beam = BeamParams(width=width, length_penalty=penalty, early_stopping=EarlyStopping(early))
        adapter = _adapter(str(line["adapter"])) if "adapter" in line else None
        params: Params = (
            PoolingParams(pooling=Pooling(line["pooling"]), adapter=adapter)
            if "pooling" in line
            else SamplingParams(
                eos_token_ids=frozenset(line.get("eos", ())),
                stop_token_ids=frozenset(line.get("stop", ())),
                beam=beam,
                adapter=adapter,
                logprobs=line.get("logprobs"),
                **{name: line[name] for name in PARAM_FIELDS if name in line},
            )
        )
        request = Request(
            request_id=str(line["id"]),
            prompt=shown_prompt(prompt, self._block_size),
            params=params,
            arrival_s=line.get("at", 0.0),
            cache_salt=_name(line, "salt"),
            cache_owner=_name(line, "owner"),
            tenant=_name(line, "tenant"),
            pins=tuple(Pin(*pin) for pin in line.get("pins", ())),
            spans=tuple(
                Span(start, num, _digest(number), atomic) for start, num, number, atomic in line.get("spans", ())
            ),
            **{name: line[name] for name in REQUEST_FIELDS if name in line},
        )
        self._scheduler.add(request)
        self.done.num_requests += 1

    def drop(self, line: dict[str, Any]) -> None:
        """End the requests that will miss their deadline."""
        self._note(self._scheduler.drop_hopeless(line["at"]))

    def abort(self, line: dict[str, Any]) -> None:
        """Abort a request."""
        self._note(self._scheduler.abort(str(line["id"]), AbortCause(line["cause"]), line["at"], line.get("choice")))

    def plan(self, line: dict[str, Any]) -> None:
        """Plan a step, and compare it with the recorded one."""
        recorded = {name: value for name, value in line.items() if name not in ("op", "at", "missing")}
        missing = {_digest(number) for number in line.get("missing", ())}
        self._scheduler.missing.has = lambda digest: digest not in missing
        plan = self._scheduler.plan(line["at"])
        planned = {} if plan is None else describe(plan)
        if planned != recorded:
            self.done.difference = f"recorded {_in_words(recorded)}; replayed {_in_words(planned)}"
        elif plan is not None:
            self._launched.append(plan)
            self.done.num_plans += 1

    def commit(self, line: dict[str, Any]) -> None:
        """Commit the oldest step, or one that ran beside it, with the recorded result."""
        plan = self._launched.pop() if line.get("newest") else self._launched.popleft()
        result = self._runner.run(plan).wait()
        draws = line.get("draws") or [0] * plan.num_samples
        drafted, tops, token_ids = line.get("drafted", {}), line.get("tops", {}), list[int]()
        result.errors = {
            int(at): Fault("failed as recorded", FailureCause(cause)) for at, cause in _items(line, "errors")
        }
        result.logprobs, result.drafted, result.ended = {}, {}, line.get("ended", ())
        for index, num_samples in enumerate([*(1 for _ in plan.slots), *(len(each.samples) for each in plan.chunks)]):
            first, place = len(token_ids), str(index)
            if place in drafted:
                ids, num_drafts, is_end = drafted[place]
                result.drafted[index] = Drafted(ids, num_drafts, is_end=is_end)
            if place in tops:
                top = tuple((token, logprob) for token, logprob in tops[place])
                result.logprobs[first] = TokenLogprob(*top[0], 1, top)
            token_ids += draws[first : first + num_samples]
        result.token_ids = token_ids
        self.done.num_committed += 1
        self._note(self._scheduler.commit(plan, result, line["at"]))

    def roll_back(self, line: dict[str, Any]) -> None:
        """Roll back the steps in flight."""
        self._launched.clear()
        self._note(self._scheduler.roll_back(line["at"], "failed as recorded" if line["failed"] else None))

    def give_up_copies(self, _line: dict[str, Any]) -> None:
        """Recompute instead of copying from now on."""
        self._scheduler.give_up_copies()

    def end(self, line: dict[str, Any]) -> None:
        """Note why the recording ends."""
        self.done.end = line["why"]

    def _note(self, events: Iterable[TokenEvent]) -> None:
        for each in events:
            if each.prompt is not None:
                self.done.ttfts_s.append(each.prompt.queue_s + each.prompt.prefill_s)


def _items(line: dict[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    items: Iterable[tuple[str, Any]] = line.get(name, {}).items()
    return items


def _digest(number: int) -> bytes:
    return b"%d" % number


def _name(line: dict[str, Any], kind: str) -> str:
    return str(line[kind]) if kind in line else ""


def _config(written: dict[str, Any]) -> SchedulerConfig:
    """Return the recorded scheduler's settings; lists become the tuples they were."""
    defaults = {each.name: each.default for each in fields(SchedulerConfig)}
    return SchedulerConfig(**{name: _as(defaults[name], value) for name, value in written.items()})


def _as(default: Any, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    values = [_as((), each) for each in value]
    return type(default)(*values) if hasattr(default, "_fields") else tuple(values)


def _in_words(plan: dict[str, Any]) -> str:
    """Describe a plan in one clause."""
    if not plan:
        return "no step"
    chunks = ", ".join(f"row {slot}: {num} from {start}" for slot, start, num in plan.get("chunks", ()))
    others = [f"{plan[name]} {name}" for name in ("drafts", "copies", "swap_out", "swap_in") if name in plan]
    parts = [f"{plan.get('decodes', 0)} decodes", f"chunks ({chunks})" if chunks else "", *others, plan["digest"]]
    return f"step {plan['step']}: {', '.join(part for part in parts if part)}"


def _adapter(name: str) -> Adapter:
    """Return an adapter, by its number in the recording."""
    return Adapter(name, sha256(name.encode()).digest())
