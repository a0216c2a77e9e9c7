"""A recorded history replays to the same plans, and holds nothing that it should not."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.types import Request
from engine.recording.recording import HiddenIds, Journal, RecordingFile, RecordingScheduler, shown_prompt
from loadtest.__main__ import main
from loadtest.errors import LoadtestError
from loadtest.simulation.recording import Replayed, replay_lines, replay_recording
from tests.patience import PATIENCE_S
from tests.pure.driver import Driver, config, request
from tests.pure.golden import GROUPS, History

NUM_HISTORIES = 8
PROMPT = (510031, 510032, 510033, 510034, 510035)
RECORDABLE = [group for group in GROUPS if "num_disk_blocks" not in GROUPS[group]]  # --record refuses a disk

MakeHistory = Callable[..., History]


class FollowUps(History):
    """A history in which every other prompt begins with an earlier prompt and some of its answer."""

    def _request(self, name: str) -> Request:
        asked, driver = super()._request(name), self._driver
        if self._random.random() < 0.5 and driver.requests:
            earlier = driver.requests[self._random.choice(sorted(driver.requests))]
            said = driver.streams.get((earlier.request_id, self._random.randrange(earlier.params.n)), [])
            tokens = (*earlier.prompt, *said, *asked.prompt)[: self._random.randint(6, 24)]
            return request(name, tokens, **{each: getattr(asked.params, each) for each in ("n", "max_tokens", "seed")})
        return asked


def record(run: Callable[[Callable[[SchedulerConfig], Scheduler]], Any]) -> list[str]:
    """Return the lines that a scheduler writes while it is run."""
    lines: list[str] = []

    def recording(settings: SchedulerConfig) -> Scheduler:
        journal = Journal(settings)
        lines.append(json.dumps(journal.header) + "\n")
        return RecordingScheduler(settings, lambda entry: lines.append(json.dumps(journal.line(entry)) + "\n"))

    run(recording)
    return lines


def record_history(make: MakeHistory, group: str, seed: int) -> list[str]:
    return record(lambda recording: make(group, seed, recording).digests())


def replay(lines: list[str]) -> Replayed:
    done = replay_lines(lines)
    num_commits = sum(json.loads(line).get("op") == "commit" for line in lines)
    assert done.difference or done.num_committed == num_commits > 0
    return done


@pytest.mark.parametrize("group", RECORDABLE)
def test_a_history_replays_to_the_recorded_plans(group: str) -> None:
    for seed in range(NUM_HISTORIES):
        assert replay(record_history(History, group, seed)).difference == "", f"{group} {seed}"


@pytest.mark.parametrize("group", ["plain", "overlap", "swap", "salts-and-adapters", "drafts"])
def test_prompts_that_continue_answers_replay_to_the_recorded_plans(group: str) -> None:
    num_cached = 0
    for seed in range(NUM_HISTORIES):
        done = replay(record_history(FollowUps, group, seed))
        assert done.difference == "", f"{group} {seed}"
        num_cached += done.stats.prefix_hit_tokens
    assert num_cached


def one_request(**changes: Any) -> list[str]:
    """Return the recording of a request with an answer of five tokens."""

    def run(recording: Callable[[SchedulerConfig], Scheduler]) -> None:
        driver = Driver(config(), scheduler=recording(config()))
        driver.add(request("a", PROMPT, max_tokens=5, eos_token_ids=frozenset(), **changes))
        driver.drain()

    return record(run)


def test_other_images_of_the_same_ids_share_no_blocks_in_a_replay() -> None:
    def run(recording: Callable[[SchedulerConfig], Scheduler]) -> None:
        driver = Driver(config(), scheduler=recording(config()))
        for name in ("first", "second", "first"):
            spans = (Span(1, 9, name.encode(), is_atomic=name == "second"),)
            asked = request(f"{name}{len(driver.requests)}", range(20), max_tokens=2)
            driver.add(dataclasses.replace(asked, spans=spans))
            driver.drain()

    done = replay(record(run))
    assert done.difference == ""
    assert 0 < done.stats.prefix_hit_tokens < 20


def test_the_first_plan_that_differs_is_named() -> None:
    lines = one_request()
    at = next(index for index, line in enumerate(lines) if '"decodes"' in line)
    lines[at] = lines[at].replace('"decodes": 1', '"decodes": 2')
    difference = replay(lines).difference
    assert difference.startswith(f"line {at + 1}: recorded step 1: 2 decodes, ")
    assert "; replayed step 1: 1 decodes, " in difference


def test_other_blocks_differ_even_if_all_sizes_agree() -> None:
    lines = one_request()
    at = next(index for index, line in enumerate(lines) if '"chunks"' in line)
    plan = json.loads(lines[at])
    lines[at] = json.dumps(plan | {"digest": "00000000"}) + "\n"
    assert replay(lines).difference.startswith(f"line {at + 1}: recorded step 0: 0 decodes, chunks (row ")


def test_a_recording_holds_no_ids_and_no_names() -> None:
    text = "".join(one_request(cache_salt="secret salt", tenant="acme", cache_owner="sk-key")[1:])
    for secret in ("secret salt", "acme", "sk-key", *map(str, PROMPT)):
        assert secret not in text


@pytest.mark.parametrize(
    "header", ['{"quire_recording": 2, "version": "0.0.1"}', '{"quire_recording": 4, "version": "9", "scheduler": {}}']
)
def test_another_version_is_refused_in_one_sentence(header: str) -> None:
    with pytest.raises(LoadtestError, match="replay it with the version that wrote it") as refused:
        replay_lines([header + "\n"])
    assert "\n" not in str(refused.value)


def test_damaged_lines_are_refused_and_a_cut_one_ends_the_replay() -> None:
    lines = one_request()
    with pytest.raises(LoadtestError, match="line 3 of it is not a JSON object"):
        replay_lines([*lines[:2], "nonsense\n"])
    with pytest.raises(LoadtestError, match=r"line 3 of it .'commit'. cannot be replayed"):
        replay_lines([*lines[:2], '{"op": "commit", "at": 0}\n'])
    assert replay_lines([*lines[:-1], lines[-1][:10]]).end == ""


def test_the_file_is_its_owners_and_says_why_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    file = RecordingFile(path, config())
    driver = Driver(config(), scheduler=RecordingScheduler(config(), file.note))
    driver.add(request("a", max_tokens=3))
    driver.drain()
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    done = replay_recording(path)
    assert (done.difference, done.end, done.num_requests) == ("", "the daemon stopped", 1)


def test_a_writer_that_falls_behind_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.recording.recording._MAX_QUEUED", 4)
    may_write, write = threading.Event(), RecordingFile._write

    def slow(file: RecordingFile, line: dict[str, Any]) -> None:
        assert may_write.wait(PATIENCE_S)
        write(file, line)

    monkeypatch.setattr(RecordingFile, "_write", slow)
    path = tmp_path / "history.jsonl"
    file = RecordingFile(path, config())
    driver = Driver(config(), scheduler=RecordingScheduler(config(), file.note))
    driver.add(request("a", max_tokens=20))
    driver.drain()
    may_write.set()
    file.close()
    done = replay_recording(path)
    assert (done.difference, done.end, done.num_requests) == ("", "the writer fell behind", 1)


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordingFile, "_write", full)
    file = RecordingFile(tmp_path / "history.jsonl", config())
    driver = Driver(config(), scheduler=RecordingScheduler(config(), file.note))
    driver.add(request("a", max_tokens=20))
    driver.drain()
    file.close()
    driver.check_streams()


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record is .*, which cannot be written: Is a directory"):
        RecordingFile(tmp_path, config())
    os.mkfifo(tmp_path / "unread")
    with pytest.raises(ConfigError, match=r"--record is .*unread', which cannot be written: No such device"):
        RecordingFile(tmp_path / "unread", config())


def test_hidden_ids_are_equal_where_the_real_prefixes_of_blocks_are() -> None:
    hidden = HiddenIds(block_size=2)
    prompts = [(5, 6, 7), (5, 6), (5, 6, 300, 1), (5, 6, 7, 8), (9,), (5, 6, 2), (4, 1, 1), (5, 256, 7), (9, 5, 5, 6)]
    invented = [shown_prompt(hidden.prompt(prompt), 2) for prompt in prompts]

    def num_common(one: Any, other: Any) -> int:
        """Return how many of the first full blocks are equal."""
        return next(
            (at for at in range(0, 8, 2) if len(one[at : at + 2]) < 2 or one[at : at + 2] != other[at : at + 2]), 8
        )

    for one, its in zip(prompts, invented, strict=True):
        assert len(one) == len(its)
        for other, others in zip(prompts, invented, strict=True):
            assert num_common(one, other) == num_common(its, others)


def test_two_recordings_of_equal_prompts_hide_them_differently() -> None:
    prompt = (31, 32, 33, 34)
    assert HiddenIds(2).prompt(prompt) != HiddenIds(2).prompt(prompt)


def test_equal_tokens_behind_others_are_hidden_differently() -> None:
    _, first, second = HiddenIds(2).prompt((5, 6, 5, 6))
    assert first != second


def test_the_command_replays_recordings_and_nothing_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figures = tmp_path / "history.jsonl", tmp_path / "figures.json"
    path.write_text("".join(one_request()))
    text = path.read_text()
    assert main(["simulate", "replay", str(path), "--json", str(figures)]) == 0
    assert "all 5 plans are as recorded" in capsys.readouterr().out
    assert json.loads(figures.read_text())["recordings"][str(path)]["steps"] == 5
    assert main(["simulate", "replay", str(path), "--policy", "priority"]) == 2
    assert "a recording is replayed as it was" in capsys.readouterr().err
    path.write_text(text.replace('"chunks": [[', '"chunks": [[1'))
    assert main(["simulate", "replay", str(path)]) == 1
    assert "differs at line 3: recorded step 0" in capsys.readouterr().out
