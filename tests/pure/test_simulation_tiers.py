"""Prefill and decode in tiers on a virtual clock: against arithmetic, against one replica, and the search for the smallest fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.queue_limits import QueueLimits
from loadtest.__main__ import main
from loadtest.simulation.costs import DEFAULT_COSTS, Handoff, StepCosts, Table
from loadtest.simulation.replay import replay
from loadtest.simulation.replica import Replica, SimulationError
from loadtest.simulation.sizing import Fleet, Sizing, Tried, smallest
from loadtest.simulation.tiers import replay_tiers
from loadtest.simulation.trace import TraceRequest

COSTS = StepCosts(
    rows=Table((0, 1, 64), (0.002, 0.003, 0.066)),  # 2 ms and a millisecond a row
    samples=Table((0, 64), (0.0, 0.0)),
    decode_context_s=0.0,
    prefill_pair_s=0.0,
    handoff=Handoff(trip_s=0.004, block_s=0.002, pause_s=0.0005, block_bytes=1000),
)


def config(**fields: object) -> SchedulerConfig:
    base = {"num_blocks": 256, "block_size": 16, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SchedulerConfig(**{**base, **fields})  # type: ignore[arg-type]


def test_a_long_prompt_takes_the_time_of_the_arithmetic() -> None:
    """100 tokens: 6 full blocks go over, the other 4 tokens are computed where the answer is."""
    (served,) = replay_tiers([TraceRequest(1.0, 100, 3)], config(), COSTS, num_prefill=1, num_decode=1).served
    prefill_s, way_s, pause_s = 2 * 0.002 + 0.1, 0.004 + 6 * 0.002, 6 * 0.0005
    assert served.queue_s == pytest.approx(prefill_s + way_s)
    assert served.ttft_s == pytest.approx(prefill_s + way_s + pause_s + 0.002 + 0.004)
    assert served.decode_s == pytest.approx(2 * 0.003)


def test_what_is_short_or_cached_stays_where_it_is() -> None:
    """64 tokens have three full blocks to hand over; the second of two alike finds all of its blocks."""
    rows = [TraceRequest(0.0, 64, 2), TraceRequest(1.0, 100, 2, 0, "app", 99), TraceRequest(2.0, 100, 2, 0, "app", 99)]
    history = replay_tiers(rows, config(), COSTS, num_prefill=1, num_decode=1)
    decode, prefill = history.replicas
    assert prefill.stats.request_prompt_tokens.count == 1
    assert decode.stats.request_prompt_tokens.count == 3
    local, first, second = sorted(history.served)
    assert local.queue_s == second.queue_s == 0.0
    assert first.queue_s > 0.1


def test_an_idle_replica_has_packed_a_prompt_long_before_the_next() -> None:
    rows = [TraceRequest(1.0, 100, 2), TraceRequest(100.0, 100, 2)]
    soon, late = sorted(replay_tiers(rows, config(), COSTS, num_prefill=1, num_decode=1).served)
    assert late.ttft_s == pytest.approx(soon.ttft_s)


def test_a_prompt_waits_until_the_one_before_it_is_packed() -> None:
    prefill_s, pause_s = 2 * 0.002 + 0.1, 6 * 0.0005
    rows = [TraceRequest(0.0, 100, 2), TraceRequest(prefill_s + 0.001, 100, 2)]
    first, second = sorted(replay_tiers(rows, config(), COSTS, num_prefill=1, num_decode=1).served)
    assert second.queue_s == pytest.approx(first.queue_s + pause_s - 0.001)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 200), st.integers(1, 20), st.sampled_from("ab ")),
        min_size=1,
        max_size=20,
    ),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([20, 256]),
)
def test_every_request_gets_exactly_its_answer(
    drawn: list[tuple[float, int, int, str]], tiers: tuple[int, int], num_blocks: int
) -> None:
    rows = [
        TraceRequest(at, prompt, output, 0, group.strip(), prompt // 2 if group.strip() else 0)
        for at, prompt, output, group in sorted(drawn)
    ]
    history = replay_tiers(rows, config(num_blocks=num_blocks), COSTS, num_prefill=tiers[0], num_decode=tiers[1])
    assert sorted(each.row for each in history.served) == sorted(rows)
    assert sum(replica.stats.generation_tokens for replica in history.replicas) == sum(
        row.output_tokens for row in rows
    )
    assert not history.living
    assert all(replica.num_requests == 0 for replica in history.replicas)


def test_a_stream_does_not_feel_prompts_that_are_computed_elsewhere() -> None:
    """But for the tokens behind their last full blocks; on one replica it feels all of them."""
    rows = [TraceRequest(0.0, 20, 450), *(TraceRequest(0.02 * number, 200, 1) for number in range(1, 6))]
    free = replace(COSTS, handoff=Handoff(trip_s=0.0, block_s=1e-9))
    apart = replay_tiers(rows, config(), free, num_prefill=1, num_decode=1)
    stream = max(apart.served, key=lambda each: each.num_tokens)
    alone = replay(rows[:1], config(), COSTS).served[0]
    together = max(replay(rows, config(), COSTS).served, key=lambda each: each.num_tokens)
    rest_s = 5 * (200 - 192) * 0.001  # of each prompt, computed beside the stream
    assert stream.decode_s == pytest.approx(alone.decode_s + rest_s, abs=1e-4)
    assert together.decode_s > stream.decode_s + 0.8


def test_a_full_prefill_tier_leaves_prompts_where_they_were_asked_for() -> None:
    rows = [TraceRequest(0.0, 200, 2)] * 30
    new_replica = partial(Replica, limits=QueueLimits(max_requests=2))
    history = replay_tiers(rows, config(), COSTS, num_prefill=1, num_decode=1, new_replica=new_replica)
    decode, prefill = history.replicas
    assert prefill.stats.rejected == 20
    assert history.num_rejected == decode.stats.rejected > 0
    assert len(history.served) + history.num_rejected == 30


def test_what_never_fits_is_refused_once() -> None:
    history = replay_tiers([TraceRequest(0.0, 600, 5)] * 2, config(), COSTS, num_prefill=1, num_decode=1)
    assert sum(history.refused.values()) == 2
    assert "maximum context length" in next(iter(history.refused))


@pytest.mark.parametrize(
    ("fields", "costs", "sentence"),
    [
        ({"enable_prefix_caching": False}, COSTS, "handed over through the prefix cache"),
        ({}, replace(COSTS, handoff=Handoff()), "do not say what handing blocks over takes"),
    ],
)
def test_what_cannot_be_simulated_is_told(fields: dict[str, object], costs: StepCosts, sentence: str) -> None:
    with pytest.raises(SimulationError, match=sentence):
        replay_tiers([TraceRequest(0.0, 9, 9)], config(**fields), costs, num_prefill=1, num_decode=1)


def test_the_smallest_fleet_of_either_kind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all fleets tried by hand: five alike would do, and 2 + 2."""
    seen = []

    def run(_: Sizing, fleet: Fleet) -> Tried:
        seen.append(fleet)
        good = fleet.num_prefill >= 2 and fleet.num_decode >= 2 if fleet.is_tiered else fleet.num_decode >= 5
        return Tried(fleet, 1.0 if good else 0.5, None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(Sizing, "run", run)
    sizing = Sizing([], config(), COSTS, router=None, targets=None)  # type: ignore[arg-type]
    found = list(sizing.search(8, 0.99))
    assert [str(fleet) for fleet in seen] == [
        "1",
        "2",
        "1 + 1",
        "3",
        "1 + 2",
        "2 + 1",
        "4",
        "1 + 3",
        "2 + 2",
        "3 + 1",
        "5",
    ]
    for is_tiered, name in ((False, "5"), (True, "2 + 2")):
        least = smallest(found, 0.99, is_tiered=is_tiered)
        assert least is not None
        assert str(least.fleet) == name
    assert smallest(found[:4], 0.99, is_tiered=True) is None


def test_the_command_tells_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "tiers.json", tmp_path / "tiers.png"
    options = ["--num", "60", "--rate", "10", "--share", "0.9", "--most", "3", "--target-tpot-ms", "100"]
    network = ["--latency-ms", "2", "--bandwidth", "1"]
    assert main(["simulate", "tiers", "steady", *options, *network, "--json", str(report), "--plot", str(picture)]) == 0
    assert "Smallest in tiers, prefill + decode: 1 + 1." in capsys.readouterr().out
    document = json.loads(report.read_text())
    assert [(each["prefill"], each["decode"]) for each in document["fleets"]] == [(0, 1), (1, 1)]
    measured = StepCosts.load(DEFAULT_COSTS).handoff
    assert document["handoff"]["trip_s"] == pytest.approx(measured.trip_s + 0.002)
    assert document["handoff"]["block_s"] == pytest.approx(measured.block_s + 368640e-9)
    assert picture.stat().st_size > 10_000
