"""The simulated daemon against arithmetic, and its figures against brute force."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.queues import POLICIES
from engine.core.scheduling.scheduler import Scheduler
from engine.overload import QueueLimits
from engine.recording.recording import Entry, Journal, RecordingScheduler
from loadtest.errors import LoadtestError
from loadtest.report import percentile
from loadtest.simulation.costs import DEFAULT_COSTS, Front, StepCosts, Table
from loadtest.simulation.figures import Targets, summarize
from loadtest.simulation.fleet import capacity, highest_speed, natural_rate
from loadtest.simulation.replay import History, replay
from loadtest.simulation.replica import Replica
from loadtest.simulation.routers import ROUTERS
from loadtest.simulation.step_times import read_recording
from loadtest.simulation.together import Model, replay_together
from loadtest.simulation.trace import TraceRequest, to_request
from loadtest.simulation.variants import measured_config
from loadtest.simulation.workloads import generate

COSTS = StepCosts(
    rows=Table((0, 1, 64), (0.002, 0.003, 0.0345)),  # 2.5 ms and half a millisecond a row
    samples=Table((0, 64), (0.0, 0.0064)),
    decode_context_s=1e-6,
    prefill_pair_s=1e-7,
    front=Front(intake_s=0.001, step_s=0.0002, token_s=1e-5, prompt_token_s=2e-5),
)
GENEROUS = Targets(10.0, 1.0)


def config(**fields: object) -> SchedulerConfig:
    base = {"num_blocks": 256, "block_size": 16, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SchedulerConfig(**{**base, **fields})  # type: ignore[arg-type]


def test_a_table_is_linear_between_its_points_and_beyond() -> None:
    table = Table((0, 10, 20), (1.0, 2.0, 4.0))
    assert [table(count) for count in (0, 5, 10, 15, 20, 30)] == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_one_request_takes_the_time_of_the_arithmetic() -> None:
    (served,) = replay([TraceRequest(3.0, 20, 3)], config(), COSTS).served
    prompt_s = 0.0025 + 20 * 0.0005 + 0.0001 + 1e-7 * 20 * 10.5 + 0.0002 + 1e-5 + 19 * 2e-5
    decode_s = [0.0025 + 0.0005 + 0.0001 + 1e-6 * context + 0.0002 + 1e-5 for context in (21, 22)]
    assert served.ttft_s == pytest.approx(0.001 + prompt_s)
    assert served.decode_s == pytest.approx(sum(decode_s))
    assert served.tpot_s == pytest.approx(sum(decode_s) / 2)
    assert served.queue_s == 0.0


def test_models_of_one_daemon_take_turns() -> None:
    """A model alone has what it has in a daemon alone; prompts of another make its streams' gaps little longer."""
    streams = Model([TraceRequest(0.0, 8, 200) for _ in range(4)], config(), COSTS)
    texts = Model([TraceRequest(0.3 + 0.02 * i, 200, 1) for i in range(20)], config(), COSTS)
    alone = replay(streams.rows, streams.config, COSTS)
    (one,) = replay_together([streams])
    assert one.served == alone.served
    both = replay_together([streams, texts])
    assert [len(each.served) for each in both] == [4, 20]
    gaps, longest = both[0].replicas[0].gaps.times, max(alone.replicas[0].gaps.times)
    assert max(gaps) > longest
    assert sum(times for gap, times in gaps.items() if gap > 2 * longest) < 40  # while the costs are not known
    alone = replay(texts.rows, texts.config, COSTS)
    assert max(each.ttft_s for each in both[1].served) > max(each.ttft_s for each in alone.served)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    first, second = replay([TraceRequest(0.0, 50, 1), TraceRequest(0.001, 1, 1)], config(), COSTS).served
    assert first.queue_s == 0.0
    assert second.queue_s == pytest.approx(first.ttft_s - 0.001)


def test_taking_requests_in_delays_the_step_after_them() -> None:
    alone = replay([TraceRequest(0.0, 8, 20)], config(), COSTS).served[0]
    rows = [TraceRequest(0.0, 8, 20), TraceRequest(alone.ttft_s + 0.001, 30, 1)]
    first = max(replay(rows, config(), COSTS).served, key=lambda served: served.num_tokens)
    with_another = 0.0005 * 30 + 1e-7 * 30 * 15.5 + 0.0001 + 1e-5 + 29 * 2e-5  # its part in one of the steps
    assert first.decode_s == pytest.approx(alone.decode_s + with_another + 0.001)


def test_a_decode_step_costs_what_its_plan_does() -> None:
    scheduler = Scheduler(config())
    for index in range(4):
        scheduler.add(to_request(TraceRequest(0.0, 5 + index, 9), index))
    plan = scheduler.plan(0.0)
    assert plan is not None
    decoding = plan._replace(chunks=(), slots=(0, 1, 2, 3), positions=(30,) * 4, num_tokens=4)
    assert COSTS.decode_step(4, 4 * 31) == pytest.approx(COSTS.step(decoding))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.5), st.integers(1, 60), st.integers(1, 40), st.integers(0, 40), st.sampled_from("abc ")
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0, 1]),
    st.sampled_from([12, 256]),
    st.integers(1, 3),
)
def test_every_request_gets_exactly_its_answer(
    drawn: list[tuple[float, int, int, int, str]], policy: str, depth: int, num_blocks: int, num_replicas: int
) -> None:
    rows = [
        TraceRequest(
            at, prompt, output, output + more if more else 0, group.strip(), prompt // 2 if group.strip() else 0
        )
        for at, prompt, output, more, group in sorted(drawn)
    ]
    roomy = config(policy=policy, num_blocks=num_blocks)
    history = replay(rows, roomy, COSTS, depth=depth, num_replicas=num_replicas, router=ROUTERS["least-loaded"])
    assert sorted(served.row for served in history.served) == sorted(rows)
    assert sum(each.stats.generation_tokens for each in history.replicas) == sum(row.output_tokens for row in rows)
    steps = sum(row.output_tokens for row in rows)
    assert history.num_sequence_steps >= steps  # and a few more for chunks and what is computed anew
    for served in history.served:
        assert 0 <= served.queue_s < served.ttft_s
        assert served.e2e_s <= history.end_s - served.row.arrival_s + 1e-9
    gaps = sum(sum(replica.gaps.times.values()) for replica in history.replicas)
    assert gaps == sum(row.output_tokens - 1 for row in rows)


def test_a_prefix_group_hits_the_cache_in_the_simulation() -> None:
    rows = [TraceRequest(float(second), 60, 2, 0, "app", 50) for second in range(5)]
    assert summarize(replay(rows, config(), COSTS), GENEROUS).prefix_hit_ratio == pytest.approx(4 * 48 / 300)
    cold = replay(rows, config(enable_prefix_caching=False), COSTS)
    assert summarize(cold, GENEROUS).prefix_hit_ratio == 0.0


def test_what_never_fits_is_refused_and_counted() -> None:
    rows = [TraceRequest(0.0, 600, 5), TraceRequest(0.0, 10, 5)]
    history = replay(rows, config(), COSTS)
    figures = summarize(history, GENEROUS)
    assert (figures.num_served, figures.num_refused) == (1, 1)
    assert "maximum context length is 512" in next(iter(history.refused))
    assert figures.goodput_ratio == 0.5


def test_overlap_hides_nothing_and_loses_nothing() -> None:
    rows = generate("steady", num=40, rate=20.0, seed=1, max_model_len=512)
    ahead, behind = (replay(rows, config(), COSTS, depth=depth) for depth in (1, 0))
    assert len(ahead.served) == len(behind.served) == 40
    assert ahead.end_s == pytest.approx(behind.end_s, rel=0.05)  # all of a step's time is the device's


def test_who_gives_way_with_a_step_in_flight_is_let_go_when_that_lands() -> None:
    rows = [TraceRequest(index * 0.01, 16, 100) for index in range(6)]
    history = replay(rows, config(num_blocks=16), COSTS, depth=1)
    assert len(history.served) == 6
    assert summarize(history, GENEROUS).preemptions > 0


def test_a_full_queue_answers_429_and_nobody_comes_again() -> None:
    """Eight slots and two who wait; the rest of twenty at once is refused."""
    limited = partial(Replica, limits=QueueLimits(max_requests=2))
    history = replay([TraceRequest(0.0, 16, 4)] * 20, config(), COSTS, new_replica=limited)
    figures = summarize(history, GENEROUS)
    assert (figures.num_served, figures.num_rejected, figures.num_refused) == (10, 10, 0)
    assert figures.goodput_ratio == 0.5
    by_tokens = partial(Replica, limits=QueueLimits(max_tokens=32))
    history = replay([TraceRequest(0.0, 16, 4)] * 20, config(max_num_seqs=1), COSTS, new_replica=by_tokens)
    assert history.num_rejected == 18, "the first that wait may have the queue's tokens, all in all"


def test_figures_agree_with_brute_force() -> None:
    rows = generate("greedy-tenant", num=80, rate=4.0, seed=2, max_model_len=512)
    history = replay(rows, config(), COSTS)
    targets = Targets(0.5, 0.02)
    figures = summarize(history, targets)
    ttfts = sorted(served.ttft_s for served in history.served)
    assert figures.ttft_s.p99 == percentile(ttfts, 0.99)
    good = [each for each in history.served if each.ttft_s <= 0.5 and each.tpot_s <= 0.02]
    assert 0 < len(good) < 80
    assert figures.goodput_ratio == len(good) / 80
    gaps = sorted(gap for gap, times in history.replicas[0].gaps.times.items() for _ in range(times))
    assert figures.itl_s.count == len(gaps)
    assert figures.itl_s.p50 in (gaps[len(gaps) // 2 - 1], gaps[len(gaps) // 2])
    assert sum(each.num_served for each in figures.tenants.values()) == 80


def test_the_highest_good_speed_is_found() -> None:
    for wanted in (0.013, 0.7, 1.0, 37.0):
        found = highest_speed(lambda speed, wanted=wanted: speed <= wanted)  # type: ignore[misc]
        assert wanted / 1.03 < found <= wanted
    assert highest_speed(lambda _: False) == 0.0


def test_two_replicas_take_about_twice_as_much() -> None:
    rows = generate("steady", num=80, rate=5.0, seed=3, max_model_len=512)
    targets, roomy = Targets(0.5, 0.05), config(max_num_batched_tokens=512)

    def found(num: int) -> float:
        router = ROUTERS["least-loaded"]
        return capacity(rows, roomy, COSTS, num_replicas=num, router=router, targets=targets, share=0.9)

    assert natural_rate(rows) == pytest.approx(5.0, rel=0.3)
    assert 1.6 < found(2) / found(1) < 3.0


def test_routers_spread_and_affinity_keeps_a_prefix_together() -> None:
    rng = Random(4)
    rows = [TraceRequest(index * 0.2, 120, 4, 0, f"app {rng.randrange(12)}", 112) for index in range(240)]
    hits = {}
    for name, router in ROUTERS.items():
        history = replay(rows, config(num_blocks=40), COSTS, num_replicas=4, router=router)
        taken = [sum(served.replica == place for served in history.served) for place in range(4)]
        assert sum(taken) == 240
        assert min(taken) > 0
        if name == "round-robin":
            assert taken == [60] * 4
        hits[name] = summarize(history, GENEROUS).prefix_hit_ratio
    assert hits["prefix-affinity"] > 1.2 * max(hits["round-robin"], hits["least-loaded"])


def test_costs_survive_a_file_and_the_default_ones_are_whole(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == COSTS
    default = StepCosts.load(DEFAULT_COSTS)
    assert measured_config(default.settings).num_blocks > 1000
    assert list(default.rows.seconds) == sorted(default.rows.seconds)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rows": {"at": [0], "seconds": [1]}}', '{"rows": {"at": [0, 0], "seconds": [1, 2]}}'],
)
def test_a_file_that_holds_no_costs_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(LoadtestError, match=r"does not hold costs as `quire calibrate` writes them"):
        StepCosts.load(path)
    with pytest.raises(LoadtestError, match="cannot be read"):
        StepCosts.load(tmp_path / "none.json")


def test_an_empty_history_has_figures() -> None:
    figures = summarize(History(replay([TraceRequest(0.0, 600, 5)], config(), COSTS).replicas), GENEROUS)
    assert figures.num_served == 0
    assert math.isnan(figures.ttft_s.p50)


def test_step_times_are_read_from_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with path.open("w") as file:
        journal = Journal(config())
        file.write(json.dumps(journal.header) + "\n")

        def note(entry: Entry) -> None:
            file.write(json.dumps(journal.line(entry)) + "\n")

        replica = Replica(config(), COSTS)
        replica._scheduler = RecordingScheduler(config(), note, replica.stats)  # recorded as a real daemon is
        for index in range(8):
            replica.submit(to_request(TraceRequest(0.0, 40 + index, 6), index), 0.0)
        replica.advance(math.inf)
    measured = read_recording(path)
    assert measured.config == config()
    assert len(measured.ttft_s) == 8
    assert len(measured.seconds) == len(measured.shapes) > 6
    assert sum(measured.seconds) == pytest.approx(replica.now)
    assert max(shape.num_tokens for shape in measured.shapes) == 64
