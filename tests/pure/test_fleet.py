"""Simulated fleets in a closed loop, the load of `loadtest fleet`, and what a recording says of step times."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.core.config import SchedulerConfig
from engine.core.types import Request, SamplingParams
from engine.recording.recording import Entry, Journal, RecordingScheduler
from loadtest.__main__ import main
from loadtest.errors import LoadtestError
from loadtest.fleet.command import Run, show
from loadtest.fleet.foresee import read_recording
from loadtest.fleet.load import Load, draw, prefixes_of
from loadtest.fleet.routers import Routing
from loadtest.simulation.closed_loop import Answered, ClosedLoop, Delays, Known, foresee
from loadtest.simulation.costs import StepCosts, Table
from loadtest.simulation.credits import cacheable, names_of
from loadtest.simulation.fleet_figures import Figures, middle
from loadtest.simulation.policies import POLICIES

MS = 1e-3
NOTHING = Table((0, 1), (0.0, 0.0))
ONE_MS_A_TOKEN = StepCosts(
    rows=Table((0, 100), (0.0, 100 * MS)), samples=NOTHING, decode_context_s=0.0, prefill_pair_s=0.0
)


def scheduler(num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64
    )


def asking(prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        Request(request_id=str(place), prompt=tuple(prompt), params=params, arrival_s=0.0)
        for place, prompt in enumerate(prompts)
    ]


def two_prefixes(order: str) -> list[Request]:
    """Return a request for each letter: its prefix of two blocks, and two tokens that no other request has."""
    return asking([[*[ord(letter)] * 8, 1000 + place, 2000 + place] for place, letter in enumerate(order)])


def mixed(seed: int) -> list[Request]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100) for _ in range(12)] for _ in range(6)]
    prompts = [[*rng.choice(prefixes), *(rng.randrange(100) for _ in range(rng.randint(1, 9)))] for _ in range(60)]
    return asking(prompts, max_tokens=6)


def serve(
    requests: Sequence[Request],
    policy: str,
    *,
    num_blocks: int = 24,
    num_clients: int = 4,
    delays: Delays = Delays(before_s=0.5 * MS, events_s=2 * MS),  # noqa: B008 - immutable
) -> tuple[ClosedLoop, list[Answered]]:
    loop = ClosedLoop(scheduler(num_blocks), ONE_MS_A_TOKEN, num_replicas=2, policy=POLICIES[policy], delays=delays)
    return loop, loop.run(requests, num_clients)


@pytest.mark.parametrize("policy", ["kv_aware", "cache_aware"])
def test_a_prefix_aware_router_beats_round_robin_as_computed_by_hand(policy: str) -> None:
    """A pool holds one request, so a daemon caches the prefix that it served last, and no other."""
    order = "AB" + "AABB" * 3  # from the third request on, round robin gives each daemon A and B in turns
    blind, answers = serve(two_prefixes(order), "round_robin", num_blocks=3, num_clients=1, delays=Delays())
    assert blind.num_cached_tokens == 8  # the second A comes to the daemon of the first
    assert [round(each.ttft_s / MS) for each in answers] == [10, 10, 2, *[10] * 11]
    aware, answers = serve(two_prefixes(order), policy, num_blocks=3, num_clients=1, delays=Delays())
    assert aware.num_cached_tokens == 12 * 8  # all but the first A and B
    assert [round(each.ttft_s / MS) for each in answers] == [10, 10, *[2] * 12]
    assert [each.replica for each in answers] == [0, 1, *[0, 0, 1, 1] * 3]


def test_credits_equal_cached_tokens_where_events_are_fast() -> None:
    loop, answers = serve(two_prefixes("ABABBA"), "kv_aware", num_blocks=24, num_clients=1, delays=Delays())
    assert sum(each.credited for each in answers) == loop.num_cached_tokens == 4 * 8


def test_a_block_is_credited_once_its_event_has_arrived() -> None:
    late = Delays(events_s=1.0)
    _, answers = serve(two_prefixes("AAAA"), "kv_aware", num_clients=1, delays=late)
    assert [each.credited for each in answers] == [0, 0, 0, 0]  # all are over before the first event
    assert [each.replica for each in answers] == [0, 1, 0, 1]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_and_a_run_repeats(policy: str, seed: int) -> None:
    loop, answers = serve(mixed(seed), policy)
    assert len(answers) == 60
    assert all(0 < each.ttft_s < each.e2e_s for each in answers)
    assert sum(each.replica == 0 for each in answers) not in (0, 60)
    again, repeated = serve(mixed(seed), policy)
    assert (answers, loop.num_cached_tokens) == (repeated, again.num_cached_tokens)


def test_an_index_of_events_equals_the_caches() -> None:
    loop, _ = serve(mixed(7), "kv_aware")
    for replica, credited in zip(loop.replicas, loop.credits, strict=True):
        credited.receive(float("inf"))
        assert len(credited) == replica.stats.blocks_cached > 0


def test_what_an_endless_cache_would_serve() -> None:
    shared = list(range(8))
    prompts = [[*shared, 90, 91], [*shared, 92], shared, [1, 2, 3, 4]]
    # The third prompt is cached to its end, but its last token is computed again, and with it its block.
    assert cacheable(prompts, 4) == [0, 8, 4, 0]
    assert names_of(prompts[0], 4) == names_of(prompts[1], 4)


def test_a_load_repeats_and_its_prefixes_fill_the_pool_so_many_times() -> None:
    load = Load(num_requests=50, num_prefixes=prefixes_of(1.7, 8192, 608), prefix_words=20, own_words=3, max_tokens=4)
    assert load.num_prefixes == 23
    prompts = draw(load, 1)
    assert prompts == draw(load, 1) != draw(load, 2)
    assert len({" ".join(each.job.text.split()[:20]) for each in prompts}) == len({each.group for each in prompts})
    assert len({each.job.text for each in draw(load._replace(num_prefixes=0), 1)}) == 50


def test_step_times_are_read_from_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    with path.open("w") as file:
        journal = Journal(scheduler(24), "ids")
        file.write(json.dumps(journal.header) + "\n")

        def note(entry: Entry) -> None:
            file.write(json.dumps(journal.line(entry)) + "\n")

        loop = ClosedLoop(scheduler(24), ONE_MS_A_TOKEN, num_replicas=1, policy=POLICIES["round_robin"])
        only = loop.replicas[0]
        only._scheduler = RecordingScheduler(scheduler(24), note, only.stats)  # recorded as a real daemon is
        loop.run(mixed(3)[:8], 3)
    measured = read_recording(path)
    assert measured.config == scheduler(24)
    assert len(measured.ttft_s) == 8
    steps = [round(each / MS) for each in measured.seconds]
    assert steps == [shape.num_tokens for shape in measured.shapes]
    assert max(steps) > 12


def test_a_foreseen_run_has_the_figures_of_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    known = Known(scheduler(24), ONE_MS_A_TOKEN, Delays(before_s=3 * MS))
    runs = []
    for policy in ("round_robin", "kv_aware"):
        foreseen = foresee(mixed(1), known, policy=policy, num_daemons=2, num_clients=4)  # fmt: skip
        assert foreseen.num_requests == sum(foreseen.shares) == 60
        assert 0 < foreseen.cached_tokens <= foreseen.ideal_tokens
        runs.append(Run("vllm", policy, "prefixes", 1, foreseen, foreseen))
    assert [Run.read(json.loads(json.dumps(run.plain()))) for run in runs] == runs
    show(runs)
    printed = capsys.readouterr().out
    assert "vllm round_robin" in printed
    assert "(+0%)" in printed
    with pytest.raises(LoadtestError, match="'manual' is not simulated"):
        foresee(mixed(1), known, policy="manual", num_daemons=2, num_clients=4)


def test_a_router_is_started_with_its_own_flags() -> None:
    command = Routing("sglang", "cache_aware", "smg launch", ["--cache-threshold", "0.5"]).command(1, 2, ["http://a"])
    assert command.argv[:4] == ["smg", "launch", "--worker-urls", "http://a"]
    assert command.argv[-2:] == ["--cache-threshold", "0.5"]
    assert Routing("vllm", "kv_aware").command(1, 2, []).argv[0] == "vllm-router"


def test_the_median_of_runs() -> None:
    figures = [
        Figures.of_times([0.1, 0.2, each], [1.0, 2.0, 3.0], num_requests=3, num_failed=0, prompt_tokens=9,
                         ideal_tokens=8, cached_tokens=each, duration_s=1.0, shares=(1, 2))
        for each in (2, 4, 8)
    ]  # fmt: skip
    assert [each.of_ideal for each in figures] == [0.25, 0.5, 1.0]
    assert middle(figures).cached_tokens == 4
    assert middle(figures).ttft_p50_s == 0.2


def test_simulate_fleet_serves_clients_that_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.json"
    fleet = ["simulate", "fleet", "shared-prefixes", "--num", "60", "--clients", "8", "--set", "num_blocks=512"]
    assert main([*fleet, "--replicas", "2", "--router", "round_robin", "cache_aware", "--json", str(path)]) == 0
    assert "round_robin" in capsys.readouterr().out
    blind, aware = json.loads(path.read_text())["fleets"]
    assert aware["cached_tokens"] > 1.3 * blind["cached_tokens"]
    assert aware["ttft_mean_s"] < blind["ttft_mean_s"]
    assert main([*fleet, "--router", "round-robin"]) == 2
    assert "--router round-robin is not known with --clients" in capsys.readouterr().err
