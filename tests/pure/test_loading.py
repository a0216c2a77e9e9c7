"""The figures of `tools loading`. No server is started."""

from __future__ import annotations

from tools.loading import Start, cells, memory


def test_a_row_has_medians_and_the_median_of_ratios() -> None:
    ours = [Start(2.0, 1200, 100), Start(4.0, 1300, 100), Start(3.0, 1250, 200)]
    theirs = [Start(1.0, 2000, 900), Start(1.0, 1000, 900), Start(2.0, 1500, 900)]
    row = cells("m.gguf", 1000, {"quire": ours, "llama-server": theirs})
    assert row == ["m.gguf", "0.00", "3.00", "1.00", "2.00", "1.25", "0.10", "1.50"]


def test_a_row_without_a_peer() -> None:
    assert cells("m.gguf", 10**9, {"quire": [Start(2.0, 10**9, 0)]})[2:5] == ["2.00", "-", "-"]


def test_memory_is_read_from_a_process_status() -> None:
    status = "Name:\tpython\nVmHWM:\t    2048 kB\nRssFile:\t       4 kB\nThreads:\t3\n"
    assert memory(status) == {"VmHWM": 2 << 20, "RssFile": 4096}
