"""Traces: arrivals and lengths of requests, read from CSV files.

The column names of the Azure LLM inference traces and of BurstGPT are accepted, too.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from engine.core.types import Request, SamplingParams
from engine.system.regular_file import check_regular
from loadtest.errors import LoadtestError


class TraceRequest(NamedTuple):
    """One line of a trace; times are seconds from its start."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0  # 0: the length of the answer
    prefix_group: str = ""  # requests of one group share ...
    prefix_tokens: int = 0  # ... this much of the beginning of their prompts
    tenant: str = ""
    priority: int = 0
    weight: float = 0.0  # of the tenant, under the policy `fair`; 0: the default
    deadline_s: float = 0.0  # for the whole answer; 0: none


class Trace(NamedTuple):
    """Requests in order of arrival, and the number of lines without output."""

    requests: list[TraceRequest]
    num_unanswered: int = 0


# Field -> the names of its column, ours first. Compared without case, blanks and underscores.
_COLUMNS = {
    "arrival_s": ("arrival_s", "arrival", "timestamp"),
    "prompt_tokens": ("prompt_tokens", "prompt", "ContextTokens", "Request tokens"),
    "output_tokens": ("output_tokens", "output", "GeneratedTokens", "Response tokens"),
    "max_tokens": ("max_tokens",),
    "prefix_group": ("prefix_group", "Session ID"),
    "prefix_tokens": ("prefix_tokens",),
    "tenant": ("tenant", "user"),
    "priority": ("priority",),
    "weight": ("weight",),
    "deadline_s": ("deadline_s",),
}
_REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
_IDS = 1 << 24  # of a prompt's own tokens; one has fewer tokens
_FRACTION = re.compile(r"(\.\d{6})\d+")  # Azure writes seven digits, datetime reads six


def read_trace(path: Path) -> Trace:
    """Return the requests of a CSV file, the first at time 0. Raises LoadtestError."""
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return _read(path, csv.reader(lines))
    except OSError as error:
        raise LoadtestError(f"the trace {path} cannot be read: {error.strerror}; --help names the workloads.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadtestError(f"the trace {path} is not a CSV file of UTF-8 text: {error}.") from None


def _read(path: Path, rows: Iterable[list[str]]) -> Trace:
    lines = iter(rows)
    places = _places(path, next(lines, []))
    requests: list[TraceRequest] = []
    num_unanswered = 0
    for number, cells in enumerate(lines, 2):
        if not cells:
            continue
        values = {name: cells[place].strip() if place < len(cells) else "" for name, place in places.items()}
        request = _request(values, f"line {number} of {path}")
        if request.output_tokens:
            requests.append(request)
        else:
            num_unanswered += 1
    if not requests:
        raise LoadtestError(f"the trace {path} holds no request.")
    return Trace(_from_zero(_with_prefixes(requests)), num_unanswered)


def _places(path: Path, header: Sequence[str]) -> dict[str, int]:
    """Return the column of each field."""
    found = {_plain(name): place for place, name in enumerate(header)}
    places = {
        field: found[_plain(name)]
        for field, names in _COLUMNS.items()
        for name in reversed(names)  # the first of the names wins
        if _plain(name) in found
    }
    for field in _REQUIRED:
        if field not in places:
            names = " or ".join(_COLUMNS[field])
            raise LoadtestError(f"the trace {path} has no column {names}; its first line is {','.join(header)!r}.")
    return places


def _plain(name: str) -> str:
    return re.sub(r"[\s_]", "", name).lower()


def _request(values: dict[str, str], where: str) -> TraceRequest:
    prompt, output = _number(values, "prompt_tokens", 1, where), _number(values, "output_tokens", 0, where)
    max_tokens, prefix = _number(values, "max_tokens", 0, where), _number(values, "prefix_tokens", 0, where)
    if 0 < max_tokens < output:
        raise LoadtestError(f"{where}: max_tokens is {max_tokens}, less than the {output} tokens of output.")
    if prefix > prompt:
        raise LoadtestError(f"{where}: prefix_tokens is {prefix}, more than the {prompt} tokens of the prompt.")
    group, tenant = values.get("prefix_group", ""), values.get("tenant", "")
    arrival_s, priority = _seconds(values["arrival_s"], where), _number(values, "priority", -_IDS, where)
    weight, deadline_s = (_not_negative(values, name, where) for name in ("weight", "deadline_s"))
    return TraceRequest(
        arrival_s, prompt, output, max_tokens, group, prefix, tenant, priority, weight=weight, deadline_s=deadline_s
    )


def _number(values: dict[str, str], name: str, least: int, where: str) -> int:
    """Return a whole number; 0 for an empty cell of an optional column."""
    text = values.get(name, "")
    if not text and name not in _REQUIRED:
        return 0
    number = _float(text)  # pandas writes whole numbers as 12.0 where a column has gaps
    if not number.is_integer() or not least <= number < _IDS:
        raise LoadtestError(f"{where}: {name} is {text!r}; it must be a whole number from {least} to {_IDS - 1}.")
    return int(number)


def _not_negative(values: dict[str, str], name: str, where: str) -> float:
    text = values.get(name, "")
    number = _float(text or "0")
    if not 0 <= number < math.inf:
        raise LoadtestError(f"{where}: {name} is {text!r}; it must be a number from 0, which is the same as none.")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str, where: str) -> float:
    """Return the seconds of a number or of a date and time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = _timestamp(text)
    if not math.isfinite(seconds):
        raise LoadtestError(
            f"{where}: the arrival is {text!r}; it must be seconds, or a time such as 2023-11-16 18:15:46."
        )
    return seconds


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(_FRACTION.sub(r"\1", text.replace("Z", "+00:00")))
    except ValueError:
        return math.nan
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _with_prefixes(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Set missing shared lengths to the group's shortest prompt less one token."""
    shortest: dict[str, int] = {}
    for request in requests:
        group = request.prefix_group
        shortest[group] = min(shortest.get(group, request.prompt_tokens), request.prompt_tokens)
    return [
        request._replace(prefix_tokens=request.prefix_tokens or shortest[request.prefix_group] - 1)
        if request.prefix_group
        else request
        for request in requests
    ]


def _from_zero(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    first_s = min(request.arrival_s for request in requests)
    moved = [request._replace(arrival_s=request.arrival_s - first_s) for request in requests]
    return sorted(moved, key=lambda request: request.arrival_s)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a file for read_trace."""
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(TraceRequest._fields)
        writer.writerows(requests)


def at_speed(requests: Iterable[TraceRequest], speed: float) -> list[TraceRequest]:
    """Return the requests, arriving `speed` times as fast."""
    return [request._replace(arrival_s=request.arrival_s / speed) for request in requests]


def clipped(requests: Iterable[TraceRequest], max_model_len: int) -> list[TraceRequest]:
    """Return the requests, cut to the model's length: outputs first, by half at most."""
    cut = []
    for request in requests:
        output = min(request.output_tokens, max(max_model_len - request.prompt_tokens, max_model_len // 2))
        prompt = min(request.prompt_tokens, max_model_len - output)
        allowed = min(request.max_tokens, max_model_len - prompt)
        prefix = min(request.prefix_tokens, prompt)
        cut.append(
            request._replace(prompt_tokens=prompt, output_tokens=output, max_tokens=allowed, prefix_tokens=prefix)
        )
    return cut


def to_request(row: TraceRequest, index: int) -> Request:
    """Return a row as a request; a group shares the tokens of its prefix.

    A simulated runner draws each token as its position (replica.py), so the last position is made an ending id.
    """
    own, shared = (index + 1) * _IDS, -(crc32(row.prefix_group.encode()) + 1) * _IDS
    prefix = range(shared, shared + row.prefix_tokens)
    params = SamplingParams(
        max_tokens=max(row.max_tokens, row.output_tokens),
        temperature=0.0,
        eos_token_ids=frozenset((row.prompt_tokens + row.output_tokens - 2,)),
    )
    return Request(
        request_id=str(index),
        prompt=(*prefix, *range(own, own + row.prompt_tokens - row.prefix_tokens)),
        params=params,
        arrival_s=row.arrival_s,
        priority=row.priority,
        tenant=row.tenant,
        weight=row.weight or 1.0,
        deadline_s=row.deadline_s or None,
    )
