"""`loadtest latency` on its virtual clock: the promise about long prompts, by the scheduler that serves."""

from __future__ import annotations

from loadtest.latency import Phases, figures
from loadtest.latency_simulated import simulate


def test_a_long_prompt_stretches_gaps_to_at_most_1_65_times_and_first_tokens_to_at_most_twice() -> None:
    rows = {name: figures(Phases(*phases)) for name, phases in simulate(8, 10_000, None)}
    assert set(rows) == {f"{name}{how}" for name in ("two cores", "fifty times that") for how in ("", ", not paced")}
    for name, row in rows.items():
        assert (row["itl_p99_ratio"] <= 1.65) == ("not paced" not in name)
        assert row["ttft_ratio"] <= 2 or "not paced" in name
        assert row["num_gaps"] > 1000


def test_figures_are_of_what_was_seen() -> None:
    row = figures(Phases([0.01] * 99 + [0.03], [0.02] * 100, 2.0, [0.1, 0.2, 0.3], [0.4]))
    assert (row["itl_p50_ms"], row["itl_p50_beside_ms"], row["itl_max_ms"]) == (10.0, 20.0, 30.0)
    assert row["ttft_ratio"] == 2.0
    assert row["stream_tokens_per_s_beside"] == 50.0
