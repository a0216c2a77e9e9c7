"""Workloads: the same seed gives the same requests, and lengths and arrival times are what was asked."""

from __future__ import annotations

import os
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.errors import LoadtestError
from loadtest.workload import Job, Length, arrivals, dataset, synthetic


def test_a_workload_follows_from_its_seed() -> None:
    def make(seed: int) -> list[Job]:
        return synthetic(20, prompt=Length(5, 50), output=Length(1, 9), seed=seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert make(1) == synthetic(40, prompt=Length(5, 50), output=Length(1, 9), seed=1)[:20]


def test_lengths_stay_in_their_range_and_reach_its_ends() -> None:
    jobs = synthetic(500, prompt=Length(3, 6), output=Length(2, 4), seed=0)
    assert {len(job.text.split()) for job in jobs} == {3, 4, 5, 6}
    assert {job.max_tokens for job in jobs} == {2, 3, 4}


def test_prefixes_are_shared() -> None:
    jobs = synthetic(60, prompt=Length(4, 4), output=Length(1, 1), seed=0, prefix_len=10, num_prefixes=3)
    prefixes = {tuple(job.text.split()[:10]) for job in jobs}
    assert len(prefixes) == 3
    assert {len(job.text.split()) for job in jobs} == {14}
    assert len({job.text for job in jobs}) == 60


@pytest.mark.parametrize(("text", "length"), [("7", Length(7, 7)), ("1:9", Length(1, 9))])
def test_lengths_are_read(text: str, length: Length) -> None:
    assert Length.parse(text) == length


@pytest.mark.parametrize("text", ["", "x", "0", "9:1", "-3", "1:2:3", "1.5"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LoadtestError, match="length"):
        Length.parse(text)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness: float) -> None:
    jobs = arrivals([Job("x", 1)] * 20_000, rate=5.0, burstiness=burstiness, seed=3)
    times = [job.arrival_s for job in jobs]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    # A gamma distribution of shape k has a standard deviation of mean / sqrt(k); k = 1 is the exponential.
    assert statistics.stdev(gaps) == pytest.approx(0.2 / burstiness**0.5, rel=0.05)


def test_a_dataset_gives_its_prompts_and_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"prompt": "two"}\n')
    jobs = dataset(path, 4, output=Length(9, 9), seed=0)
    assert sorted(jobs) == [Job("one", 3), Job("one", 3), Job("two", 9), Job("two", 9)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"),
        ("not json\n", "line 1"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2"),
        ('{"prompt": 3}\n', "line 1"),
        ("[]\n", "line 1"),
        ('{"prompt": ' + "[" * 100_000, "line 1"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(LoadtestError, match=sentence):
        dataset(path, 1, output=Length(1, 1), seed=0)


def test_a_file_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, sentence in (("none", "No such file"), ("pipe", "it is a FIFO"), ("bytes", "is not UTF-8 text")):
        with pytest.raises(LoadtestError, match=sentence):
            dataset(tmp_path / name, 1, output=Length(1, 1), seed=0)
