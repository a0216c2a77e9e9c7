"""Products on tiles of AMX: the order of their sums, and hardware beside the model that stands in for it (tile_model.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.execution.device import load_kernels
from engine.runtime.native import build, library, tiles
from engine.runtime.native.build import Isa, best_isa, machine_isas
from engine.runtime.native.library import Library, WeightFormat, choose_kernels, native
from engine.runtime.native.tiles import sum_as_tiles
from engine.system.host_limits import processor_name
from tests.cpu.native_linears import int8, packed
from tests.cpu.tile_model import tile_model

LEAST = 2.0**-126  # the least normal float32; what is smaller is 0 on tiles


@pytest.mark.parametrize("num_inputs", [2, 30, 32, 64, 70, 1408])
def test_sums_have_the_documented_order(num_inputs: int) -> None:
    torch.manual_seed(num_inputs)
    x, weight = torch.randn(40, num_inputs).bfloat16(), torch.randn(70, num_inputs).bfloat16()
    x[3, :2], weight[5, 1] = LEAST / 8, LEAST / 2
    expected = sum_as_tiles(x, weight)
    linear = packed(tile_model(), weight)
    assert torch.equal(linear(x, torch.float32), expected)
    for num_rows in (1, 15, 16, 17, 33):
        assert torch.equal(linear(x[:num_rows], torch.float32), expected[:num_rows])


def test_the_order_is_another_than_that_of_pairs() -> None:
    """So what names K/V has the instruction set in it."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 1024).bfloat16(), torch.randn(70, 1024).bfloat16()
    other = native()
    model = tile_model()
    assert other is not None
    assert not torch.equal(packed(other, weight)(x, torch.float32), packed(model, weight)(x, torch.float32))


def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(0)
    linear, x = packed(tile_model(), torch.randn(70, 96).bfloat16()), torch.randn(20, 96).bfloat16()
    expected = linear(x)
    x[4, 7], x[11, 90] = torch.nan, torch.inf
    found = linear(x)
    others = [row for row in range(20) if row not in (4, 11)]
    assert not found[[4, 11]].isfinite().any()
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("make", [packed, int8])
def test_the_machine_does_what_the_model_does(make: Callable[..., Callable[..., Tensor]]) -> None:
    if Isa.AMX not in machine_isas():
        pytest.skip("this machine has no AMX: its kernels are proven by a model alone")
    choose_kernels("amx")
    machine = native()
    assert machine is not None
    torch.manual_seed(1)
    weight = torch.randn(200, 1500).bfloat16()
    real, model = make(machine, weight), make(tile_model(), weight)
    for num_rows in (1, 7, 8, 33, 200):
        x = (torch.randn(num_rows, 1500) * 10.0 ** torch.randint(-39, 30, (1, 1500))).bfloat16()
        assert torch.equal(real(x, torch.float32), model(x, torch.float32))
    choose_kernels("auto")


@pytest.fixture
def with_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Library]:
    """A machine whose tiles are the model's, and nothing is known about them."""
    fast, isas = native(), (*(isa for isa in machine_isas() if isa is not Isa.AMX), Isa.AMX)
    if fast is None:
        pytest.skip("no native library and no C compiler")
    for module in (build, library, tiles):
        monkeypatch.setattr(module, "machine_isas", lambda: isas)
    monkeypatch.setitem(library._loaded, (Isa.AMX, False), tile_model())
    monkeypatch.setattr(tiles, "tile_file", lambda: tmp_path / "tiles.json")
    monkeypatch.setitem(build.tile_facts(), processor_name(), [])
    del build.tile_facts()[processor_name()]
    choose_kernels("auto")
    yield fast
    for weight_format in WeightFormat:
        tile_model().use_tiles(weight_format, 0)
    monkeypatch.undo()
    choose_kernels("auto")


def test_tiles_that_lose_are_left_alone(with_tiles: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As those of the model do; all formats are measured, and have the same bits either way."""
    assert tiles.measure_tiles(tile_model()) == []
    assert all(tiles._least_rows(tile_model(), weight_format) == tiles.NEVER for weight_format in WeightFormat)
    load_kernels("auto", lambda _: None)
    assert native() is with_tiles
    assert not caplog.text
    load_kernels("amx", lambda _: None)
    assert native() is tile_model()
    assert "AMX is of no use here" in caplog.text
    assert json.loads((tmp_path / "tiles.json").read_text()) == {processor_name(): []}


def test_tiles_that_win_are_taken(with_tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "repeat", lambda call, **_: [call() or next(clock)])
    clock = cycle((1.0, 2.0))
    found = tiles.measure_tiles(tile_model())
    assert [rows for rows in found if rows < tiles.NEVER] == [1] * (len(WeightFormat) - 2)
    assert best_isa() is not Isa.AMX
    load_kernels("amx", lambda _: None)
    assert native() is tile_model()
    monkeypatch.setattr(tiles, "measure_tiles", lambda _: pytest.fail("they are known"))
    load_kernels("amx", lambda _: None)


def test_an_order_of_sums_that_is_not_expected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles._has_order(tile_model())
    if (other := native()) is not None and other.isa is not Isa.AMX:
        assert not tiles._has_order(other)


def test_tiles_are_refused_where_there_are_none() -> None:
    if Isa.AMX in machine_isas():
        pytest.skip("needs a machine without AMX")
    with pytest.raises(ConfigError, match=r"This machine has no AMX|there are no native kernels"):
        choose_kernels("amx")
