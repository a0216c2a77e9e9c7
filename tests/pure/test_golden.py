"""The scheduler says, plans and does what it did when golden.py recorded it."""

from __future__ import annotations

import json

import pytest

from tests.pure.golden import GROUPS, RECORDED, histories


@pytest.mark.parametrize("group", GROUPS)
def test_histories_are_as_they_were_recorded(group: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    for name, digests in histories([group]):
        assert digests == recorded[name], f"{name} differs; if that is meant: python -m tests.pure.golden {group}"
