"""Prompts, lengths and arrival times of requests, all drawn from one seed.

Text is made of short common words. Nearly every tokenizer maps each to one token, so a prompt of n words has about n
tokens on any server; reports use the server's counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.system.regular_file import check_regular
from loadtest.errors import LoadtestError

COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face
"""
WORDS = COMMON.split()


class Job(NamedTuple):
    """One request: its text, its max_tokens, and its arrival in seconds."""

    text: str
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Length:
    """A length in tokens, uniform in [low, high]; fixed where they are equal."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Length:
        """Read "128" or "64:256". Raises LoadtestError."""
        low, _, high = text.partition(":")
        try:
            length = cls(int(low), int(high or low))
        except ValueError:
            raise LoadtestError(f"length {text!r} is not a number or a range such as 64:256.") from None
        if not 1 <= length.low <= length.high:
            raise LoadtestError(f"length {text!r} must start at 1 or more and not run backwards.")
        return length

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def text_of(rng: random.Random, num_words: int) -> str:
    """Return words for a prompt of about as many tokens."""
    return " ".join(rng.choices(WORDS, k=num_words))


def synthetic(
    num: int, *, prompt: Length, output: Length, seed: int, prefix_len: int = 0, num_prefixes: int = 1
) -> list[Job]:
    """Return jobs of random words, each after one of some shared prefixes."""
    rng = random.Random(seed)
    prefixes = [text_of(rng, prefix_len) + " " if prefix_len else "" for _ in range(num_prefixes)]
    return [Job(rng.choice(prefixes) + text_of(rng, prompt.draw(rng)), output.draw(rng)) for _ in range(num)]


def dataset(path: Path, num: int, *, output: Length, seed: int) -> list[Job]:
    """Return jobs of a JSONL file of prompts. Raises LoadtestError."""
    rng = random.Random(seed)
    try:
        rows = list(_rows(path))
    except OSError as error:
        raise LoadtestError(f"the dataset {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise LoadtestError(f"the dataset {path} is not UTF-8 text: {error}.") from None
    if not rows:
        raise LoadtestError(f"the dataset {path} is empty.")
    rng.shuffle(rows)
    drawn = (rows[index % len(rows)] for index in range(num))
    return [Job(row["prompt"], row.get("max_tokens") or output.draw(rng)) for row in drawn]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    check_regular(path)
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                valid = isinstance(row["prompt"], str)
            except (ValueError, KeyError, TypeError, RecursionError):
                valid = False
            if not valid:
                raise LoadtestError(f'line {number} of {path} is not a JSON object with a "prompt" string.')
            yield row


def arrivals(jobs: Sequence[Job], *, rate: float, burstiness: float, seed: int) -> list[Job]:
    """Return the jobs with arrivals at `rate` requests a second.

    Burstiness 1 is a Poisson process, less arrives in bursts, more is steadier.
    """
    times = arrival_times(random.Random(seed), len(jobs), rate, burstiness)
    return [job._replace(arrival_s=time_s) for job, time_s in zip(jobs, times, strict=True)]


def arrival_times(rng: random.Random, num: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Return ascending times with gamma-distributed gaps, the first of them 0."""
    times, now = [], 0.0
    for _ in range(num):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
