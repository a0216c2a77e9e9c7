"""The worked example of a mixer: registered by one line, it runs in torch and in C, over the paged pool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from ctypes import CDLL, addressof, c_char
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402 - after torch was found

from engine.files.hf_config import HFConfig  # noqa: E402
from engine.runtime.layers.layer import MIXERS  # noqa: E402
from engine.runtime.layers.model_config import ModelConfig  # noqa: E402
from engine.runtime.models import families  # noqa: E402
from engine.runtime.models.decoder import Decoder  # noqa: E402
from engine.runtime.models.load import load_model  # noqa: E402
from engine.runtime.native import build  # noqa: E402
from engine.runtime.native.library import native  # noqa: E402
from engine.runtime.native.parts import PagedStep  # noqa: E402
from engine.settings.engine_config import EngineConfig  # noqa: E402
from tests.cpu.dense_attention import DenseAttention  # noqa: E402
from tests.cpu.model_driver import make_runner, request, serve, settings, solo_greedy  # noqa: E402
from tests.examples.running_mean import RunningMean  # noqa: E402

SIZES = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CPU = torch.device("cpu")


def with_means(hf: HFConfig) -> ModelConfig:
    """Llama with means in its second layer, which has no positions."""
    llama = families.llama(hf)
    return replace(llama, layers=(llama.layers[0], replace(llama.layers[1], mixer="running_mean", rope=None)))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Decoder]:
    library, installed, compiler = native(), build.best_library(), build.find_compiler()
    if library is None or installed is None or compiler is None:
        pytest.skip("no native library and no C compiler")
    source, made = Path(__file__).with_name("running_mean.c"), tmp_path / "running_mean.so"
    include = f"-I{Path(build.__file__).parent}"
    subprocess.run([compiler, *build._FLAGS, include, "-shared", "-o", made, source, installed], check=True)
    kind = addressof(c_char.in_dll(CDLL(str(made)), "kind_running_mean"))
    monkeypatch.setitem(library._kinds, "running_mean", kind)
    monkeypatch.setitem(MIXERS, "running_mean", "tests.examples.running_mean:RunningMean")
    monkeypatch.setitem(families.FAMILIES, "llama", with_means)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    loaded = load_model(config, CPU, torch.float32, lambda progress: None)
    assert isinstance(loaded, Decoder)
    return loaded


def test_it_is_the_mean_of_what_came_before(model: Decoder) -> None:
    mixer, x = model._layers[1]._mixer, torch.randn(9, 32)
    assert isinstance(mixer, RunningMean)
    means = mixer._v(x).cumsum(0) / torch.arange(1, 10)[:, None]
    found = mixer(x, None, DenseAttention(model.states), None)
    torch.testing.assert_close(found, mixer._o(means))


def test_c_computes_the_definition_chunk_by_chunk(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of every step of the runner, prompts in chunks, against one pass in torch."""
    assert model._native is not None
    in_c, hidden = model._native.forward, dict[int, Tensor]()

    def forward(ids: Tensor, positions: Tensor, step: PagedStep, rows: Tensor | None, *_: object) -> Tensor:
        states = in_c(ids, positions, step, None, None)
        hidden.update(zip(positions.tolist(), states, strict=True))
        return states if rows is None else states[rows]

    monkeypatch.setattr(model._native, "forward", forward)
    prompt, config = list(range(3, 24)), settings(max_num_batched_tokens=8)
    asked = request("r", prompt, max_tokens=6, logprobs=1)  # steps with it are not plain: each is a forward pass
    served = serve(model, config, [asked], runner=make_runner(model, config))
    ids = served.ids["r", 0]
    assert ids == solo_greedy(model, prompt, 6)
    every = torch.tensor(prompt + ids[:-1])
    expected = model.forward(every, torch.arange(len(every)), DenseAttention(model.states))
    torch.testing.assert_close(torch.stack([hidden[at] for at in range(len(every))]), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1
