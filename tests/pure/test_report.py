"""The figures of a benchmark, on answers whose times are known."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import Outcome
from loadtest.output import markdown, save_json
from loadtest.report import percentile, show, summarize


def answer(start: float, chunks: list[float], tokens: int | None, error: str = "") -> Outcome:
    return Outcome(
        start_s=start,
        end_s=chunks[-1] if chunks else start,
        chunks=chunks,
        prompt_tokens=10,
        completion_tokens=tokens,
        finish_reason="" if error else "length",
        error=error,
    )


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for quantile in (50, 90, 99):
        assert percentile(ordered, quantile / 100) == pytest.approx(cuts[quantile - 1], abs=1e-6)


def test_percentile_of_nothing_and_of_one() -> None:
    assert math.isnan(percentile([], 0.5))
    assert percentile([3.0], 0.99) == 3.0


def test_figures_of_two_answers() -> None:
    point = summarize(
        "concurrency 2", 2, [answer(0.0, [1.0, 1.5, 2.0], 3), answer(1.0, [4.0, 5.0], 5)], duration_s=10.0
    )
    assert (point.num_requests, point.num_failed, point.output_tokens, point.prompt_tokens) == (2, 0, 8, 20)
    assert point.output_tokens_per_s == pytest.approx(0.8)
    assert point.total_tokens_per_s == pytest.approx(2.8)
    assert point.requests_per_s == pytest.approx(0.2)
    assert (point.ttft_s.mean, point.ttft_s.p50) == (pytest.approx(2.0), pytest.approx(2.0))
    # (2 - 1) / 2 tokens, (5 - 4) / 4 tokens: by the tokens counted, though the second came in two chunks.
    assert point.tpot_s.mean == pytest.approx((0.5 + 0.25) / 2)
    assert (point.itl_s.count, point.itl_s.mean) == (3, pytest.approx(2.0 / 3))
    assert point.tokens_per_chunk == pytest.approx(8 / 5)
    assert point.e2e_s.p99 == pytest.approx(2.0 + 0.99 * 2.0)


def test_a_failed_request_counts_as_failed_and_as_nothing_else() -> None:
    good = answer(0.0, [1.0, 2.0], 2)
    alone = summarize("x", 1, [good], duration_s=2.0)
    mixed = summarize("x", 1, [good, answer(0.0, [0.1, 50.0], 99, error="HTTP 500: no")], duration_s=2.0)
    assert (mixed.num_failed, mixed.errors) == (1, {"HTTP 500: no": 1})
    assert mixed.finish_reasons == {"length": 1}
    for name in ("output_tokens", "output_tokens_per_s", "ttft_s", "tpot_s", "itl_s", "e2e_s", "requests_per_s"):
        assert getattr(mixed, name) == getattr(alone, name)


def test_answers_without_usage_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    point = summarize("x", 1, [answer(0.0, [1.0, 2.0], None)], duration_s=2.0)
    assert (point.num_without_usage, point.output_tokens, point.num_failed) == (1, 0, 0)
    assert math.isnan(point.tokens_per_chunk)
    show([point])
    assert "no usage" in capsys.readouterr().out


def test_the_tables_show_the_errors(capsys: pytest.CaptureFixture[str]) -> None:
    bad = answer(0.0, [], None, error="HTTP 429: [full] try later")
    show([summarize("concurrency 4", 4, [bad, bad], duration_s=1.0)])
    assert "2 x HTTP 429: [full] try later" in capsys.readouterr().out


def test_the_columns_of_a_table_line_up() -> None:
    assert list(markdown(("load", "s"), [("a", 1), ("longer", 12.5)])) == [
        "| load   |    s |",
        "| ------ | ---: |",
        "| a      |    1 |",
        "| longer | 12.5 |",
    ]


def test_the_document_is_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    points = [summarize("x", 1, [], duration_s=1.0)]
    save_json(path, {"settings": {"seed": 0, "plot": Path("x.png")}, "points": points})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert document["settings"] == {"seed": 0, "plot": "x.png"}
    assert document["points"][0]["ttft_s"]["p50"] is None
