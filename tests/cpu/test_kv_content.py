"""K/V of another model is never used: what outlives or leaves a process is named by the content of its files.

The models here are fine-tunes of one base: their files have equal names, sizes and times, and other numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.budget import StepTime
from engine.core.errors import ModelLoadError, ParcelError
from engine.core.kv import tiers
from engine.core.stats import TransferKind
from engine.files import file_digests
from engine.handover import HandoverConfig
from engine.loop import Engine
from engine.runtime.layers.parts import AdaptedMatrix, Target
from engine.runtime.lora.loader import LoraLoader
from engine.runtime.native.build import Isa
from engine.runtime.native.library import native
from engine.runtime.pool.groups import LayerGroups
from engine.runtime.stores import tier
from engine.runtime.stores.folder import SharedStore
from engine.runtime.stores.tier import Tier
from engine.settings.engine_config import EngineConfig
from engine.settings.peer import Peer
from engine.startup import build
from engine.startup import fingerprint as module
from engine.startup.fingerprint import ModelContent, fingerprint
from tests.cpu.model_driver import request
from tests.cpu.test_disk_store import PROMPTS, answers, engine_on, tiny
from tests.cpu.test_handover_bits import daemon
from tests.cpu.test_shared_folder import say
from tests.cpu.test_weights_gguf import split
from tests.patience import PATIENCE_S, POLL_S, eventually

TIME = (1_600_000_000 * 10**9,) * 2


def tune(model: Path, folder: Path) -> Path:
    """Return a copy with other weights of the same sizes, both with the same times."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    begin = len(content) // 2
    content[begin:-4096] = content[begin + 4096 :]  # other numbers, of the same kind
    content += bytes(4096)
    content[-4096:] = content[begin : begin + 4096]
    weights.write_bytes(content[: weights.stat().st_size])
    for path in (*model.iterdir(), *folder.iterdir()):
        os.utime(path, ns=TIME)
    assert [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(model.iterdir())] == [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())
    ]
    return folder


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two fine-tunes, in the folders of two bases."""
    monkeypatch.setattr(file_digests, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    monkeypatch.setattr(tier, "LOOK_S", POLL_S)
    model = tiny(tmp_path)
    return model, tune(model, tmp_path / "tuned" / "model")


def test_a_model_that_was_replaced_between_two_starts_finds_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, tuned = pair
    alone = answers(engine_on(tuned, tmp_path / "none"))
    before = answers(engine_on(model, tmp_path / "kv"))
    assert before != alone, "the models differ"
    for path in tuned.iterdir():
        shutil.copy2(path, model)  # in place, with its times
    after = engine_on(model, tmp_path / "kv")
    assert answers(after) == alone
    assert not after.stats.transferred[TransferKind.LOAD]


def opened_tier(engine: Engine, name: str) -> Tier:
    assert engine._offload is not None
    found = engine._offload._transports[name]
    assert isinstance(found, Tier)
    return found


def test_two_models_on_one_folder_share_nothing(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = Counter[object](), SharedStore.news

    def counted(self: SharedStore) -> object:
        found = look(self)
        looks[self] += 1
        return found

    def looked(engine: Engine) -> None:
        """Wait until an engine that does not run has seen what is in the folder now."""
        others = opened_tier(engine, "shared").store
        seen = looks[others]
        eventually(lambda: looks[others] > seen + 1)
        assert engine._offload is not None
        engine._offload.learn()

    monkeypatch.setattr(SharedStore, "news", counted)
    model, tuned = pair
    folder = tmp_path / "kv"
    alone = say(engine_on(tuned, tmp_path / "none"))
    say(engine_on(model, folder))
    beside = engine_on(tuned, folder)
    looked(beside)
    assert say(beside) == alone
    assert not beside.stats.transferred[TransferKind.LOAD]


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_parcel_of_another_model_is_refused(pair: tuple[Path, Path], tmp_path: Path, over_tcp: bool) -> None:
    model, tuned = pair
    near = HandoverConfig(folder=tmp_path / "parcels")
    listening = HandoverConfig(folder=tmp_path / "parcels", listen=Peer("127.0.0.1", 0), key="k")
    asked = request("0", PROMPTS[0], max_tokens=8)
    with daemon(model, listening if over_tcp else near, "float32", "auto") as prefill:
        prefill.say([asked])
        port = prefill.handover.port
        peer = None if port is None else Peer("127.0.0.1", port)
        far = HandoverConfig(folder=tmp_path / "other", peers=frozenset({peer} if peer else ()), key="k")
        with daemon(tuned, far if over_tcp else near, "float32", "auto") as decode:
            offer = prefill.handover.send(prefill.prefix(asked))
            assert offer is not None
            with pytest.raises(ParcelError, match=r"another model|no such parcel"):
                decode.handover.receive(offer.name, decode.prefix(asked), peer)


BLOCKS = [torch.zeros(3, 4)]


def name(model: Path, dtype: str = "float32", blocks: list[torch.Tensor] = BLOCKS, **settings: Any) -> str:
    config = EngineConfig(model=str(model), **settings)
    return fingerprint(config, dtype, blocks, ModelContent(config), LayerGroups((0, 0), (0, 8), (16,)))


def test_the_fingerprint_is_of_every_setting_that_changes_kv(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tuned = pair
    mine = name(model)
    assert mine == name(model, blocks=[torch.zeros(9, 4)]), "the pool's size is not"
    assert mine == name(model, max_model_len=32, seed=5, num_threads=1, max_num_seqs=3)
    longer = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    others = [
        name(tuned),
        name(model, "bfloat16"),
        name(model, blocks=[torch.zeros(3, 4, dtype=torch.bfloat16)]),
        name(model, blocks=[torch.zeros(3, 8)]),
        name(model, block_size=32),
        name(model, kv_cache_dtype="int8"),
        name(model, state_dtype="bfloat16"),
        name(model, quantization="int8"),
        name(model, model_impl="transformers"),
        name(model, attention_backend="torch"),
        name(model, hf_overrides={"rope_theta": 5e5}),
        name(model, hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        name(model, hf_overrides=longer),
        name(model, hf_overrides=longer, max_model_len=32),
        name(model, hf_overrides=longer, max_model_len=48),
        name(model, load_format="dummy"),
        name(model, load_format="dummy", seed=1),
    ]
    library = native()
    if library is not None:
        monkeypatch.setattr(library, "isa", Isa.AVX512 if library.isa is not Isa.AVX512 else Isa.PORTABLE)
        others.append(name(model))
        monkeypatch.undo()
    for what in ("VERSION", "source_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(module, what, (lambda: "another") if what == "source_digest" else "another")
            if what == "VERSION" or library is not None:
                others.append(name(model))
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps({**json.loads(config), "rms_norm_eps": 0.5}))
    others.append(name(model))
    (model / "config.json").write_text(config)
    assert name(model) == mine
    (model / "quantize_config.json").write_text("{}")
    others.append(name(model))
    assert len({mine, *others}) == 1 + len(others)


def test_what_changes_no_kv_changes_no_fingerprint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = pair
    mine = name(model)
    for beside in (
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "README.md",
        "consolidated.safetensors", "model-00001-of-00002.safetensors", "adapter_config.json",
    ):  # fmt: skip
        (model / beside).write_text("something else")
        assert name(model) == mine, beside
    copy, link = tmp_path / "copy", tmp_path / "link"
    shutil.copytree(model, copy)
    link.symlink_to(copy)
    assert name(copy) == name(link) == mine
    weights = copy / "model.safetensors"
    weights.rename(tmp_path / ("0" * 64))
    weights.symlink_to(tmp_path / ("0" * 64))
    assert name(copy) == mine
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.resolve().write_bytes(content)
    assert name(copy) != mine, "a name of 64 digits is not believed"


def test_shards_are_read_in_their_order(pair: tuple[Path, Path]) -> None:
    model, _ = pair
    shards = [model / f"model-0000{each}-of-00002.safetensors" for each in (1, 2)]
    for shard in shards:
        shutil.copy2(model / "model.safetensors", shard)
    (model / "model.safetensors").unlink()
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": shards[0].name, "b": shards[1].name}})
    )
    mine = name(model)
    (model / "model-00003-of-00002.safetensors").write_text("that no index names")
    assert name(model) == mine
    shards[0].rename(model / "aside")
    shards[1].rename(shards[0])
    (model / "aside").rename(shards[1])
    assert name(model) != mine, "of two tensors with one name the last is loaded"


def test_every_part_of_a_split_gguf_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "cache_folder", lambda: tmp_path / "cache")
    first, *_, last = split(tmp_path)[1]
    mine = name(first)
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert name(first) != mine


def test_a_head_that_drafts_counts_and_another_draft_does_not(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, tuned = pair

    def drafted(method: str, draft: Path) -> str:
        return name(model, speculative_config={"method": method, "model": str(draft), "num_speculative_tokens": 2})

    assert drafted("draft_model", model) == drafted("draft_model", tuned) == name(model), "its pool is its own"
    assert len({drafted("eagle3", model), drafted("eagle3", tuned), name(model)}) == 3


def test_a_start_without_tiers_reads_nothing_for_names(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    monkeypatch.setattr("engine.startup.fingerprint.ModelContent", lambda _: pytest.fail("it is not needed"))
    engine = engine_on(model, Path("unused"), kv_offload_dir=None)
    assert engine.facts.layout is None
    engine.stop(0.0)


def test_an_engine_that_cannot_be_built_stops_reading(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelLoadError("no model")

    def stop(content: ModelContent) -> None:
        stopped.append(content)

    stopped: list[ModelContent] = []
    monkeypatch.setattr(ModelContent, "stop", stop)
    monkeypatch.setattr(build, "load_model", fail)
    with pytest.raises(ModelLoadError, match="no model"):
        engine_on(pair[0], tmp_path / "kv")
    assert len(stopped) == 1
    stopped[0]._digests.stop()


def test_weights_that_are_replaced_while_they_are_loaded_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tuned = pair
    load_model = build.load_model

    def replaced(*args: Any) -> Any:
        loaded = load_model(*args)
        shutil.copy2(tuned / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(model / "model.safetensors")
        return loaded

    monkeypatch.setattr(build, "load_model", replaced)
    with pytest.raises(ModelLoadError, match="changed while it was being loaded"):
        engine_on(model, tmp_path / "kv")
    assert not list((tmp_path / "kv").glob("*")), "no part has a wrong name"


def saved_adapter(folder: Path, rank: int, tensors: dict[str, bytes]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    named = {}
    for module_and_side, content in tensors.items():
        which, side = module_and_side.split(".")
        flat = torch.frombuffer(bytearray(content), dtype=torch.float32)
        named[f"base_model.model.{which}.lora_{side}.weight"] = flat.view((rank, -1) if side == "A" else (-1, rank))
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def test_adapters_whose_bytes_are_cut_in_other_places_have_other_names(tmp_path: Path) -> None:
    """The K/V of an adapter is named by its tensors; each is chosen here so that both make one sequence of bytes."""
    targets = {
        name: Target(0, AdaptedMatrix(place), 0, size, (size, size), None)
        for name, place, size in (("a", 0, 8), ("bb", 1, 4))
    }
    mark = b"torch.float32"
    first_b = bytes(19) + mark
    stream = bytes(32) + mark + first_b + b"bb 1.0" + mark + bytes(16) + mark + bytes(16)
    assert stream[64:77] == mark
    pair = [
        saved_adapter(tmp_path / "1", 1, {"a.A": bytes(32), "a.B": first_b, "bb.A": bytes(16), "bb.B": bytes(16)}),
        saved_adapter(tmp_path / "2", 2, {"a.A": stream[:64], "a.B": stream[77:]}),
    ]
    loader = LoraLoader(targets, max_rank=8, dtype=torch.float32, device=torch.device("cpu"))
    first, second, again = (loader.load("one name", str(folder)).digest for folder in (*pair, pair[0]))
    assert first != second
    assert first == again
