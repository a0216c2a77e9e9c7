"""A recorded history replays to the same plans; it holds nothing that it should not, and is refused if another wrote it."""

from __future__ import annotations

import json

import pytest

from engine.core.config import SchedulerConfig
from engine.core.scheduler import Scheduler
from engine.recording import CONTENTS, Entry, Journal, RecordingScheduler
from loadtest.simulation.recording import Replayed, replay_lines
from tests.pure.golden import GROUPS, History

NUM_HISTORIES = 24
RECORDABLE = [group for group in GROUPS if "num_disk_blocks" not in GROUPS[group]]  # --record refuses a disk


def record(group: str, seed: int, contents: str) -> list[str]:
    """The lines of a random history."""
    lines: list[str] = []

    def recording(config: SchedulerConfig) -> Scheduler:
        journal = Journal(config, contents)
        lines.append(json.dumps(journal.header) + "\n")

        def note(entry: Entry) -> None:
            lines.append(json.dumps(journal.line(entry)) + "\n")

        return RecordingScheduler(config, note)

    History(group, seed, recording).digests()
    return lines


def replay(lines: list[str]) -> Replayed:
    done = replay_lines(lines)
    plans = sum(json.loads(line).get("op") == "commit" for line in lines)
    assert done.num_committed == plans or done.difference
    return done


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("group", RECORDABLE)
def test_a_history_replays_to_the_plans_that_were_recorded(group: str, contents: str) -> None:
    for seed in range(NUM_HISTORIES):
        assert replay(record(group, seed, contents)).difference == "", f"{group} {seed}"
