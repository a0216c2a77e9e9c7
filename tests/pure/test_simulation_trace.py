"""Traces as people have them: our columns, Azure's and BurstGPT's, and what is told of a file that is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import LoadtestError
from loadtest.simulation.trace import TraceRequest, at_speed, clipped, read_trace, to_request, write_trace
from loadtest.simulation.workloads import WORKLOADS, generate

OURS = """arrival_s,prompt_tokens,output_tokens,max_tokens,prefix_group,prefix_tokens,tenant,priority
10.5,30,7,16,a,20,alice,1
10.0,5,3,,,,,
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,8,1
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,7,0.5,ChatGPT,472,18,490,Conversation log
45,7,1.5,ChatGPT,1087,230,1317,Conversation log
118,,2.5,GPT-4,417,0,417,API log
120,,2.5,GPT-4,417.0,276,693,API log
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_our_columns(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, OURS)).requests
    assert found == [TraceRequest(0.0, 5, 3), TraceRequest(0.5, 30, 7, 16, "a", 20, "alice", 1)]


def test_azures_columns(tmp_path: Path) -> None:
    first, second, last = read_trace(written(tmp_path, AZURE)).requests
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert last.arrival_s == pytest.approx(176 * 86_400 - 65_746.67066, abs=1e-4)


def test_burstgpts_columns(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, BURSTGPT))
    assert trace.num_unanswered == 1
    assert [row.arrival_s for row in trace.requests] == [0.0, 40.0, 115.0]
    assert [row.output_tokens for row in trace.requests] == [18, 230, 276]
    # What a session shares is not told: as much as its shortest prompt lets it be.
    assert [(row.prefix_group, row.prefix_tokens) for row in trace.requests] == [("7", 471), ("7", 471), ("", 0)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no column arrival_s or arrival or timestamp"),
        ("arrival_s,prompt_tokens\n1,2\n", "no column output_tokens"),
        ("arrival_s,prompt,output\n", "holds no request"),
        (
            "arrival_s,prompt,output\n0,1,1\n1,0,5\n",
            "line 3 of {path}: prompt_tokens is '0'; it must be a whole number",
        ),
        ("arrival_s,prompt,output\n0,1.5,1\n", "line 2 of {path}: prompt_tokens is '1.5'"),
        ("arrival_s,prompt,output\n0,1e30,1\n", "it must be a whole number from 1 to 16777215"),
        ("arrival_s,prompt,output\n0,1\n", "line 2 of {path}: output_tokens is ''"),
        ("arrival_s,prompt,output\nyesterday,1,1\n", "line 2 of {path}: the arrival is 'yesterday'"),
        ("arrival_s,prompt,output\nnan,1,1\n", "line 2 of {path}: the arrival is 'nan'"),
        ("arrival_s,prompt,output,max_tokens\n0,1,9,8\n", "max_tokens is 8, less than the 9 tokens"),
        ("arrival_s,prompt,output,prefix_tokens\n0,4,9,8\n", "prefix_tokens is 8, more than the 4 tokens"),
        ("arrival_s,prompt,output,priority\n0,4,9,high\n", "priority is 'high'"),
        ("arrival_s,prompt,output,weight\n0,4,9,-1\n", "weight is '-1'"),
        ("arrival_s,prompt,output,deadline_s\n0,4,9,soon\n", "deadline_s is 'soon'"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LoadtestError) as caught:
        read_trace(path)
    assert sentence.format(path=path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(LoadtestError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadtestError, match="cannot be read: it is a FIFO"):
        read_trace(tmp_path / "pipe")
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadtestError, match="not a CSV file of UTF-8"):
        read_trace(tmp_path / "trace.csv")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_follows_from_its_seed_and_survives_a_file(tmp_path: Path, name: str) -> None:
    rows = generate(name, num=60, rate=3.0, seed=5, max_model_len=2048)
    assert rows == generate(name, num=60, rate=3.0, seed=5, max_model_len=2048)
    assert rows != generate(name, num=60, rate=3.0, seed=6, max_model_len=2048)
    assert len(rows) == 60
    assert rows == sorted(rows, key=lambda row: row.arrival_s)
    assert all(row.prompt_tokens + max(row.output_tokens, row.max_tokens) <= 2048 for row in rows)
    write_trace(tmp_path / "trace.csv", rows)
    assert read_trace(tmp_path / "trace.csv").requests == rows


@given(
    st.builds(
        TraceRequest,
        st.just(0.0),
        st.integers(1, 9000),
        st.integers(1, 9000),
        st.just(0) | st.integers(9000, 20000),
        st.just("a"),
        st.just(1),
    ),
    st.integers(2, 5000),
)
def test_a_clipped_request_fits_and_is_cut_no_further_than_that(row: TraceRequest, max_model_len: int) -> None:
    (cut,) = clipped([row], max_model_len)
    total = cut.prompt_tokens + max(cut.output_tokens, cut.max_tokens)
    assert total <= max_model_len
    assert cut.prompt_tokens >= 1
    assert cut.output_tokens >= 1
    if row.prompt_tokens + max(row.output_tokens, row.max_tokens) <= max_model_len:
        assert cut == row


def test_speed_scales_arrivals_alone() -> None:
    assert at_speed([TraceRequest(8.0, 3, 4)], 4.0) == [TraceRequest(2.0, 3, 4)]


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    rows = [TraceRequest(0.0, 40, 5, 0, group, 24) for group in ("a", "a", "b")]
    one, other, stranger = (to_request(row, index).prompt for index, row in enumerate(rows))
    assert one[:24] == other[:24]
    assert not set(one[24:]) & set(other)
    assert not set(one) & set(stranger)
    assert len(one) == 40


def test_tenant_and_weight_reach_the_scheduler() -> None:
    request = to_request(TraceRequest(7.0, 4, 2, tenant="alice", priority=3, weight=2.5), 0)
    assert (request.tenant, request.priority, request.weight, request.arrival_s) == ("alice", 3, 2.5, 7.0)
    assert to_request(TraceRequest(0.0, 4, 2), 0).weight == 1.0
    assert to_request(TraceRequest(0.0, 4, 2, deadline_s=1.5), 0).deadline_s == 1.5
    assert to_request(TraceRequest(0.0, 4, 2), 0).deadline_s is None
