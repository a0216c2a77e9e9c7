"""Models that see images, through the whole engine against transformers, over tiny random checkpoints."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
import transformers
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.activations import GELUTanh

from engine.core.config import SchedulerConfig
from engine.core.errors import InvalidRequestError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.stats import FailureCause, PreemptionKind
from engine.core.types import BeamParams, FinishReason, Request, StepEvents
from engine.images import Image
from engine.runtime.cuda import available
from engine.runtime.execution.image_rows import ImageVectors
from engine.runtime.execution.pieces import Pieces
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.models.tower import Tower, load_tower
from engine.runtime.models.tower_ops import TowerOps
from engine.runtime.native.library import native
from engine.runtime.native.ops import FLOAT_FORMATS
from engine.runtime.pool.groups import group_layers
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.engine_logprobs import TIGHT, largest_difference
from tests.cpu.model_driver import CPU, NAMED, Named, Served, make_runner, request, serve, settings, state_blocks
from tests.fake_device import CUDA, fake_device
from tests.patience import PATIENCE_S

PLACE = 100  # the id of a placeholder
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
AXES = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
QWEN3_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
PLACES = {"image_token_id": PLACE, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3VLConfig": {
        "text_config": TEXT | {"rope_parameters": AXES},
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]},
        **PLACES,
    },
    "Qwen3VLMoeConfig": {
        "text_config": TEXT
        | {"num_hidden_layers": 2, "rope_parameters": AXES, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32},
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [1, 2]},
        **PLACES,
    },
    "Qwen2_5_VLConfig": {
        "text_config": TEXT | {"num_hidden_layers": 2, "rope_parameters": AXES},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 64,
            "window_size": 16,  # of two by two vectors
            "fullatt_block_indexes": [1],
        },
        **PLACES,
    },
    "Qwen2VLConfig": {
        "text_config": TEXT | {"num_hidden_layers": 2, "rope_parameters": AXES},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 4},
        **PLACES,
    },
    "Qwen3_5Config": {
        "text_config": TEXT
        | DELTA
        | {"head_dim": 64, "rope_parameters": AXES | {"partial_rotary_factor": 0.25}}
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2},
        "vision_config": QWEN3_VISION,
        **PLACES,
    },
    "Qwen3_5MoeConfig": {
        "text_config": TEXT
        | DELTA
        | {"head_dim": 64, "rope_parameters": AXES | {"partial_rotary_factor": 0.25}}
        | {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "full_attention_interval": 2},
        "vision_config": QWEN3_VISION,
        **PLACES,
    },
}


WINDOWED = {
    "text_config": TEXT
    | {"sliding_window": 12, "query_pre_attn_scalar": 16}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 16,
    "image_token_index": PLACE,
}
CONFIGS_BOTH_WAYS = {"Gemma3Config": WINDOWED}


SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
MARK = 60  # text within an image


def run(num: int) -> list[int]:
    return [PLACE] * num


# By config class: settings, an image's arrays as the family's processor makes them, and its ids.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "Mistral3Config": (
        {
            "text_config": TEXT | {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None},
            "vision_config": SIGLIP | {"model_type": "pixtral", "image_size": 64},
            "image_token_index": PLACE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        {"pixel_values": (1, 3, 16, 24), "image_sizes": [[16, 24]]},
        [*run(3), MARK, *run(3)],
    ),
    "LlavaConfig": (
        {
            "text_config": TEXT | {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None},
            "vision_config": SIGLIP | {"model_type": "pixtral", "image_size": 64},
            "image_token_index": PLACE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"pixel_values": (1, 3, 8, 12), "image_sizes": [[8, 12]]},
        [*run(3), MARK, *run(3)],
    ),
    **{
        name: (
            {
                "text_config": TEXT | {"model_type": "llama", "num_hidden_layers": 2},
                "vision_config": SIGLIP | {"image_size": 32},
                "image_token_id": PLACE,
                "scale_factor": 4,
            },
            {"pixel_values": (1, 3, 3, 32, 32), "pixel_attention_mask": np.ones((1, 3, 32, 32), np.int64)},
            [*run(4), MARK, *run(4), MARK, MARK, *run(4)],
        )
        for name in ("Idefics3Config", "SmolVLMConfig")
    },
    "Lfm2VlConfig": (
        {
            "text_config": TEXT
            | {"model_type": "lfm2", "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
            | {"layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "image_token_id": PLACE,
            "projector_hidden_size": 40,
        },
        {
            "pixel_values": (2, 16, 48),
            "pixel_attention_mask": [[1] * 16, [1] * 8 + [0] * 8],
            "spatial_shapes": [[4, 4], [2, 4]],
        },
        [*run(4), MARK, *run(2)],
    ),
    "InternVLConfig": (
        {
            "text_config": TEXT | {"model_type": "qwen2", "num_hidden_layers": 2},
            "vision_config": SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": PLACE,
        },
        {"pixel_values": (3, 3, 16, 16)},
        run(12),
    ),
    "LlavaOnevisionConfig": (
        {
            "text_config": TEXT | {"model_type": "qwen2", "num_hidden_layers": 2},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
            "image_token_index": PLACE,
            "image_grid_pinpoints": [[16, 16], [16, 32]],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"pixel_values": (1, 3, 3, 16, 16), "image_sizes": [[15, 30]], "batch_num_images": [1]},
        run(16 + 4 * 9),
    ),
}


for name, text, tower in (
    (
        "vision",
        {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
        {"standardize": True, "use_clipped_linears": True},
    ),
    ("inputs", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}, {}),
):
    FAMILIES[f"Gemma4Config {name}"] = (
        {
            "text_config": TEXT
            | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}
            | text,
            "vision_config": SIGLIP
            | {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 64}
            | tower,
            "image_token_id": PLACE,
        },
        {
            "pixel_values": (1, 24, 48),
            "image_position_ids": np.stack(np.meshgrid(np.arange(6), np.arange(4)), -1).reshape(1, 24, 2),
        },
        run(6),
    )


for wanted in ("vision", None):
    FAMILIES[f"Gemma4UnifiedConfig {wanted or ''}"] = (
        {
            "text_config": TEXT
            | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}
            | {"use_bidirectional_attention": wanted},
            "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 16}
            | {"output_proj_dims": 32},
            "image_token_id": PLACE,
        },
        {
            "pixel_values": (1, 8, 192),
            "image_position_ids": np.stack(
                [np.array([0, 1, 2, 0, 1, 2, -1, -1]), np.array([0, 0, 0, 1, 1, 1, -1, -1])], -1
            )[None],
        },
        run(6),
    )


class Vision(NamedTuple):
    """A tiny model, transformers' and ours."""

    path: Path
    theirs: torch.nn.Module
    model: Decoder
    tower: Tower


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@cache
def vision(folder: Path, name: str) -> Vision:
    """A checkpoint of random weights, read by both."""
    torch.manual_seed(0)
    path = folder / name
    known = CONFIGS | CONFIGS_BOTH_WAYS | {name: each[0] for name, each in FAMILIES.items()}
    settings = getattr(transformers, name.split(maxsplit=1)[0])(**known[name])
    theirs = AutoModelForImageTextToText.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.3 if "embed" in key else 0.15)
    theirs.save_pretrained(path)
    checkpoint = open_checkpoint("auto", path)
    return Vision(path, theirs, load_on(CPU, path), load_tower(checkpoint.config, checkpoint, torch.float32, CPU))


def load_on(device: torch.device, path: Path) -> Decoder:
    model = load_model(EngineConfig(model=str(path), dtype="float32"), device, torch.float32, lambda progress: None)
    assert isinstance(model, Decoder)
    return model


def picture(rows: int, columns: int, seed: int) -> Image:
    """An image of so many patches, of four of which a vector is made."""
    generator = np.random.default_rng(seed)
    pixels = generator.standard_normal((rows * columns, 3 * 2 * 4 * 4), np.float32)
    arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])}
    grid = (1, rows // 2, columns // 2)
    image = Image(b"image %d" % seed, arrays, rows * columns // 4, grid)
    NAMED.found[image.digest] = image
    return image


def square(seed: int) -> Image:
    """An image of one size, as Gemma 3 takes it."""
    pixels = np.random.default_rng(seed).standard_normal((1, 3, 32, 32), np.float32)
    image = Image(b"square %d" % seed, {"pixel_values": pixels}, 16)
    NAMED.found[image.digest] = image
    return image


_random = random.Random(5)
WIDE, TALL, LARGE, SMALL = picture(4, 8, 1), picture(8, 4, 2), picture(8, 8, 3), picture(4, 4, 4)


def prompt(*parts: int | Image) -> tuple[list[int], list[Image]]:
    """A prompt of so many tokens of text, and of images."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, Image):
            ids += [PLACE] * part.num_tokens
        else:
            ids += [_random.randrange(3, 100) for _ in range(part)]
    return ids, [part for part in parts if isinstance(part, Image)]


FIRST = prompt(9, LARGE, 6)
PROMPTS = [FIRST, prompt(3, WIDE, 1, TALL, 20), (FIRST[0] + [7, 8, 9], [LARGE]), prompt(11), prompt(2, SMALL, 3, LARGE)]
ONE, OTHER = square(1), square(2)
SQUARE = prompt(9, ONE, 6)
SQUARES = [SQUARE, prompt(3, OTHER, 1, ONE, 20), (SQUARE[0] + [7, 8, 9], [ONE]), prompt(11), prompt(2, ONE, 3, OTHER)]
ALL = [*PROMPTS, *SQUARES]
IMAGES = {tuple(ids): images for ids, images in ALL}


def ask(request_id: str, ids: Sequence[int], **fields: Any) -> Request:
    """A request with the images of a prompt."""
    images, spans, start = IMAGES[tuple(ids)], list[Span](), 0
    for image in images:
        start = ids.index(PLACE, start)
        spans.append(Span(start, image.num_tokens, image.digest, is_atomic=image.grid is None))
        start += image.num_tokens
    return replace(request(request_id, ids, **fields), spans=tuple(spans), images=tuple(images))


class Theirs:
    """transformers' model over a context that begins with one of the prompts."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: torch.Tensor, **fields: Any) -> Any:
        context = ids[0].tolist()
        # Of those that it begins with, the longest.
        _, found = max((len(known), images) for known, images in ALL if context[: len(known)] == known)
        if not found:
            return self._model(ids, **fields)
        arrays = {
            name: torch.from_numpy(np.concatenate([each.arrays[name] for each in found])) for name in found[0].arrays
        }
        kind = "mm_token_type_ids" if found[0].grid else "token_type_ids"
        return self._model(ids, **{kind: (ids == PLACE).int()}, **arrays, **fields)


def runner_of(found: Vision, config: SchedulerConfig) -> ModelRunner:
    runner = make_runner(found.model, config)
    runner.take_images(found.tower, 1 << 20)
    return runner


@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_says_what_transformers_says(name: str, folder: Path) -> None:
    found = vision(folder, name)
    size = state_blocks(found.model, TIGHT.block_size)
    config = replace(TIGHT, num_blocks=46 if size else 16, state_blocks=size, writes_midway=True)
    texts = [ids for ids, _ in PROMPTS]
    runner = runner_of(found, config)
    assert largest_difference(found.model, Theirs(found.theirs), texts, config, ask=ask, runner=runner) < 1e-4


def test_torch_computes_them_without_the_native_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = vision(folder, "Qwen3VLConfig")
    monkeypatch.setattr(found.model, "_native", None)
    texts, config = [ids for ids, _ in PROMPTS], replace(TIGHT, num_blocks=16)
    runner = runner_of(found, config)
    assert largest_difference(found.model, Theirs(found.theirs), texts, config, ask=ask, runner=runner) < 1e-4


@pytest.mark.parametrize("is_native", [True, False])
def test_images_that_attend_both_ways_are_computed_whole(
    is_native: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vision(folder, "Gemma3Config")
    if not is_native:
        monkeypatch.setattr(found.model, "_native", None)
    groups = group_layers(found.model.states, torch.float32, 256)
    config = settings(max_num_batched_tokens=18, num_blocks=60, windows=groups.windows, has_full=groups.has_full)
    runner = make_runner(found.model, config, "auto" if is_native else "torch")
    runner.take_images(found.tower, 1 << 20)
    texts = [ids for ids, _ in SQUARES]
    assert largest_difference(found.model, Theirs(found.theirs), texts, config, ask=ask, runner=runner) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_images_of_other_families_say_what_transformers_says(name: str, folder: Path) -> None:
    found, (_, given, ids) = vision(folder, name), FAMILIES[name]
    generator = np.random.default_rng(7)
    arrays = {
        key: generator.standard_normal(value, np.float32) if isinstance(value, tuple) else np.array(value)
        for key, value in given.items()
    }
    image = Image(name.encode(), arrays, ids.count(PLACE))
    NAMED.found[image.digest] = image
    found.tower.check(image)
    text = [*range(3, 14), *ids, 20, 21, 22]
    span = Span(11, len(ids), image.digest, is_atomic=name.endswith("vision"))
    asked = [
        replace(request(f"{i}", text + more, max_tokens=8, logprobs=1), spans=(span,), images=(image,))
        for i, more in enumerate([[], [23, 24, 25, 26], []])
    ]
    config = settings(max_num_batched_tokens=9)
    config = replace(config, state_blocks=state_blocks(found.model, config.block_size), writes_midway=True)
    scheduler = Scheduler(config)
    served = serve(found.model, config, asked, apart=4, runner=runner_of(found, config), scheduler=scheduler)
    assert scheduler.stats.prefix_hit_tokens > 0
    for each in asked:
        answer = served.ids[each.request_id, 0]
        context = torch.tensor([[*each.prompt, *answer]])
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        if name.startswith("Gemma4"):
            tensors["mm_token_type_ids"] = (context == PLACE).int()
        if name.startswith(
            "Gemma4Unified"
        ):  # whose forward, other than generate, lets images attend both ways everywhere
            embedded = torch.zeros(*context.shape, 64)
            places = torch.arange(context.shape[1])[None]
            make = found.theirs.create_masks_for_generate
            tensors["attention_mask"] = make(
                found.theirs.config, embedded, None, None, places, tensors["mm_token_type_ids"]
            )
        with torch.no_grad():
            logits = found.theirs(context, **tensors, use_cache=False).logits[0, len(each.prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
        entries = [entry for event in served.events[each.request_id, 0] for entry in event.logprobs or ()]
        wanted = logits.log_softmax(-1)[range(len(answer)), answer]
        torch.testing.assert_close(torch.tensor([entry.logprob for entry in entries]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_divided", [False, True], ids=["as 5.17 returns them", "as 5.23 does"])
def test_levels_are_one_tensor_or_one_for_each_image(is_divided: bool) -> None:
    class Model(nn.Module):
        def get_image_features(self, pixel_values: torch.Tensor, return_dict: bool) -> SimpleNamespace:
            lower = 2 * pixel_values
            return SimpleNamespace(
                pooler_output=(pixel_values,), deepstack_features=[[lower] if is_divided else lower] * 2
            )

    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    made = Tower(Model(), CPU)(Image(b"", {"pixel_values": vectors}, num_tokens=4))
    assert made is not None
    assert torch.equal(made, torch.from_numpy(np.stack((vectors, 2 * vectors, 2 * vectors))))


@pytest.mark.parametrize("name", ["Qwen3VLConfig", "Gemma3Config"])
def test_a_gpu_says_what_a_cpu_says(name: str, folder: Path) -> None:
    found, config = vision(folder, name), settings(max_num_batched_tokens=20, num_blocks=60, block_size=16)
    prompts = SQUARES if name in CONFIGS_BOTH_WAYS else PROMPTS
    made = {image.digest: found.tower(image) for _, images in prompts for image in images}

    def answers(device: torch.device, model: Decoder) -> dict[tuple[str, int], list[int]]:
        runner = make_runner(model, config, "torch", device=device)
        runner.take_images(lambda image: made[image.digest].to(device), 1 << 20)
        asked = [ask(f"{i}", ids, max_tokens=4) for i, (ids, _) in enumerate(prompts)]
        return serve(model, config, asked, depth=1, apart=1, runner=runner).ids

    with pytest.MonkeyPatch.context() as patch, fake_device() as device:
        patch.setattr(available, "has_triton", lambda device: False)
        said = answers(CUDA, load_on(CUDA, found.path))
        assert device.num_launches > 50
    assert said == answers(CPU, found.model)


@pytest.mark.parametrize("name", ["Qwen3VLConfig", "Qwen3_5Config"])
def test_batch_mates_chunks_forks_and_swaps_change_no_bit(name: str, folder: Path) -> None:
    found = vision(folder, name)
    roomy = settings(num_blocks=300, state_blocks=state_blocks(found.model, 4), writes_midway=True)
    fields = {"logprobs": 3, "max_tokens": 14}
    alone = {}
    for i, (ids, _) in enumerate(PROMPTS):
        alone |= said(serve(found.model, roomy, [ask(f"{i}", ids, **fields)], runner=runner_of(found, roomy)))
    tight = replace(roomy, max_num_batched_tokens=9)
    if not tight.state_blocks:
        tight = replace(tight, num_blocks=22, num_host_blocks=60)
    scheduler = Scheduler(tight)
    together = [ask(f"{i}", ids, n=1 + i % 2, **fields) for i, (ids, _) in enumerate(PROMPTS)]
    runner = runner_of(found, tight)
    mixed = said(serve(found.model, tight, together, runner=runner, scheduler=scheduler, apart=1))
    assert scheduler.stats.preempted[PreemptionKind.SWAP] > 0 or tight.state_blocks
    assert {request_id for request_id, _ in mixed} == {request_id for request_id, _ in alone}
    assert all(mixed[request_id, choice] == alone[request_id, 0] for request_id, choice in mixed)


def test_beams_and_drafts_go_on_behind_images(folder: Path) -> None:
    found = vision(folder, "Qwen3VLConfig")
    config = settings(num_blocks=300)
    ids, _ = PROMPTS[1]
    [beams] = expected(found, 1, num_beams=3, max_new_tokens=8)
    searched = serve(
        found.model,
        config,
        [ask("a", ids, max_tokens=8, logprobs=0, beam=BeamParams(width=3))],
        runner=runner_of(found, config),
    )
    assert searched.ids["a", 0] == beams
    runner = runner_of(found, drafting := replace(config, num_speculative_tokens=3))
    runner.speculate(TextDrafter(1, 3))
    [plain] = expected(found, 1, max_new_tokens=24)
    drafted = serve(found.model, drafting, [ask("b", ids, max_tokens=24)], runner=runner)
    assert drafted.ids["b", 0] == plain


def expected(found: Vision, index: int, **fields: Any) -> list[list[int]]:
    """What `generate` says after a prompt."""
    ids, images = PROMPTS[index]
    tokens = torch.tensor([ids])
    arrays = {
        name: torch.from_numpy(np.concatenate([each.arrays[name] for each in images])) for name in images[0].arrays
    }
    with torch.no_grad():
        answers = found.theirs.generate(
            tokens,
            mm_token_type_ids=(tokens == PLACE).int(),
            **arrays,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **fields,
        )
    return [answer[len(ids) :].tolist() for answer in answers]


def test_vectors_are_kept_up_to_a_limit_and_work_for_nobody_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, made = vision(folder, "Qwen3VLConfig").tower, list[bytes]()

    def embed(image: Image) -> torch.Tensor:
        made.append(image.digest)
        return tower(image)

    size = tower(SMALL).nbytes
    vectors = ImageVectors(embed, 5 * size, NAMED)
    vectors.advance([LARGE.digest], 0.0)
    with monkeypatch.context() as left:
        left.delitem(NAMED.found, LARGE.digest)
        vectors.advance([SMALL.digest, WIDE.digest], 0.0)
    vectors.advance([LARGE.digest], 0.0)  # a plan that did not come to the first goes on with it
    vectors.advance([SMALL.digest, WIDE.digest], 60.0)
    assert [vectors.has(image.digest) for image in (LARGE, SMALL, WIDE)] == [False, True, False]
    vectors.advance([WIDE.digest], 60.0)
    assert torch.equal(vectors(SMALL), tower(SMALL))
    vectors.advance([TALL.digest], 60.0)  # SMALL was used after WIDE
    assert [vectors.has(image.digest) for image in (SMALL, WIDE, TALL)] == [True, True, True]
    vectors.advance([LARGE.digest], 60.0)
    assert [vectors.has(image.digest) for image in (SMALL, WIDE, TALL, LARGE)] == [False, False, False, True]
    assert made == [LARGE.digest, SMALL.digest, WIDE.digest, TALL.digest, LARGE.digest]
    vectors.advance([SMALL.digest], 0.0)
    assert any(thread.name == "quire-pieces" for thread in threading.enumerate())
    vectors.close()
    assert all(thread.name != "quire-pieces" for thread in threading.enumerate())


def said(served: Served) -> dict[tuple[str, int], Any]:
    """All that events say of the tokens of each answer."""
    return {key: [event.logprobs for event in events if event.logprobs] for key, events in served.events.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_are_those_of_generate(name: str, folder: Path) -> None:
    found = vision(folder, name)
    config = settings(num_blocks=300, state_blocks=state_blocks(found.model, 4), writes_midway=True)
    ids, _ = PROMPTS[1]
    served = serve(found.model, config, [ask("a", ids, max_tokens=12)], runner=runner_of(found, config))
    assert [served.ids["a", 0]] == expected(found, 1, max_new_tokens=12)


class _Block(torch.nn.Module):
    """A product, and attention of several images with heads of an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(40, 3 * 2 * 20)
        mlps = [(torch.nn.Linear(40, 64), each, torch.nn.Linear(64, 40)) for each in (torch.nn.GELU(), GELUTanh())]
        self.mlps = torch.nn.Sequential(*[torch.nn.Sequential(*mlp) for mlp in mlps])
        self.patches = torch.nn.Conv3d(2, 40, (1, 4, 5))

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = x + self.patches(self.mlps(x).view(-1, 2, 1, 4, 5)).view(x.shape)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 20).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operations_of_a_tower_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    block, x = _Block().to(dtype).requires_grad_(False), torch.randn(2, 300, 40, dtype=dtype)
    mask = torch.ones(300, 300, dtype=torch.bool).tril()
    cases: list[dict[str, Any]] = [{}, {"scale": 0.5, "dropout_p": 0.0}, {"attn_mask": mask}, {"is_causal": True}]
    expected = [block(x, **how) for how in cases]
    ops = TowerOps(block)
    with ops:
        found = [block(x, **how) for how in cases]
        alone = block(x[1:])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol={torch.float32: 1e-5}.get(dtype, 2e-2), rtol=0)
    assert torch.equal(alone[0], found[0][1])
    is_fused = native() is not None and dtype in FLOAT_FORMATS
    assert [type(mlp[1]) is torch.nn.Identity for mlp in block.mlps] == [is_fused] * 2


def test_a_tower_goes_on_between_steps_and_can_be_left(folder: Path) -> None:
    tower, num_turns = vision(folder, "Qwen3VLConfig").tower, 1
    pieces = Pieces(lambda: tower(LARGE))
    while not pieces.advance(0.0):
        num_turns += 1
    assert num_turns > 50
    assert torch.equal(pieces.result(), tower(LARGE))
    left = Pieces(lambda: tower(LARGE))
    assert not left.advance(0.0)
    left.close()


def test_an_image_beyond_the_memory_of_a_device_is_no_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps nothing else would catch the error, and the engine would end."""
    tower = vision(folder, "Qwen3VLConfig").tower

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(tower._model, "get_image_features", fail)
        pieces = Pieces(lambda: tower(LARGE))
        assert pieces.advance(60.0)
        assert pieces.result() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_numpy", fail)
        assert tower(LARGE) is None
    whole = tower(LARGE)
    assert whole is not None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", lambda levels: torch.full_like(whole, torch.inf))
        assert tower(LARGE) is None
    assert tower(LARGE) is not None


@pytest.mark.parametrize("depth", [0, 1])
def test_an_image_that_could_not_be_computed_is_tried_again_for_others(depth: int, folder: Path) -> None:
    """Neither its vectors nor the K/V behind them are kept; a request beside it goes on."""
    found, num_failures = vision(folder, "Qwen3VLConfig"), 1

    def embed(image: Image) -> torch.Tensor | None:
        nonlocal num_failures
        num_failures -= image.digest == LARGE.digest
        return None if image.digest == LARGE.digest and num_failures >= 0 else found.tower(image)

    config = settings(num_blocks=300, max_num_batched_tokens=9)
    at = next(i for i, (_, each) in enumerate(PROMPTS) if LARGE in each)
    others = [i for i in range(len(PROMPTS)) if LARGE not in PROMPTS[i][1]]
    asked = [ask(f"{i}", PROMPTS[i][0], max_tokens=8, logprobs=1) for i in (at, *others)]
    plain = [said(serve(found.model, config, [each], runner=runner_of(found, config))) for each in asked]
    runner, scheduler = make_runner(found.model, config), Scheduler(config)
    runner.take_images(embed, 1 << 20)
    served = serve(found.model, config, asked, runner=runner, scheduler=scheduler, depth=depth)
    [event] = served.events[f"{at}", 0]
    assert event.error is not None
    assert "An image of this request could not be computed" in str(event.error)
    assert scheduler.stats.failed[FailureCause.IMAGE] == 1
    assert all(said(served)[f"{i}", 0] == answer[f"{i}", 0] for i, answer in zip(others, plain[1:], strict=True))
    again = serve(found.model, config, asked[:1], runner=runner, scheduler=scheduler, depth=depth)
    assert said(again) == plain[0]


def test_vectors_that_could_not_be_made_are_there_for_one_request() -> None:
    vectors = ImageVectors(lambda image: None, 1 << 20, NAMED)
    for _ in range(2):
        vectors.advance([SMALL.digest], 60.0)
        assert vectors.has(SMALL.digest)
        assert vectors(SMALL) is None
        assert not vectors.has(SMALL.digest)
    vectors.advance([SMALL.digest], 60.0)
    vectors.close()
    assert not vectors.has(SMALL.digest)


def test_a_tower_has_the_threads_of_the_process() -> None:
    """Torch's, which spin, are one beside those of the native library."""
    usual = torch.get_num_threads()
    try:
        for num_threads in (3, 1):
            torch.set_num_threads(num_threads)
            pieces = Pieces(torch.get_num_threads)
            assert pieces.advance(60.0)
            assert pieces.result() == num_threads
    finally:
        torch.set_num_threads(usual)


def test_an_engine_is_built_with_its_tower(folder: Path) -> None:
    path = str(vision(folder, "Qwen3VLConfig").path)
    events = queue.SimpleQueue[StepEvents]()
    lines = list[str]()
    config = EngineConfig(model=path, dtype="float32", max_model_len=80, max_num_seqs=2, kv_cache_memory_bytes=1 << 20)
    engine = build_engine(config, lambda progress: lines.append(progress.detail))
    engine.start(events.put)
    try:
        assert engine.facts.takes_images
        assert "qwen3_vl serves text and images; sound is refused" in lines
        engine.submit(ask("a", PROMPTS[1][0], max_tokens=3))
        ids = list[int]()
        while len(ids) < 3:
            ids += [token for event in events.get(timeout=PATIENCE_S) for token in event.token_ids]
        other = ask("b", PROMPTS[4][0])
        with pytest.raises(InvalidRequestError, match="not what this model's vision tower takes"):
            engine.submit(replace(other, images=(replace(SMALL, arrays={"pixels": np.zeros(1)}), LARGE)))
        damaged = replace(SMALL, digest=b"odd", arrays=SMALL.arrays | {"pixel_values": np.zeros((16, 5), np.float32)})
        spans = (other.spans[0]._replace(digest=b"odd"), other.spans[1])
        for request_id, reason in (("c", FinishReason.LENGTH), ("d", FinishReason.ERROR), ("e", FinishReason.LENGTH)):
            asked = ask(request_id, PROMPTS[0][0], max_tokens=1)  # whose image is then in one step with the damaged one
            if request_id == "d":
                asked = replace(other, spans=spans, images=(damaged, LARGE))
            engine.submit(asked)
            [end] = [event for event in events.get(timeout=PATIENCE_S) if event.finish_reason]
            assert end.finish_reason is reason
    finally:
        engine.stop(drain_s=0)
    without = build_engine(replace(config, image_cache_memory=0), lambda progress: None)
    with pytest.raises(InvalidRequestError, match="takes no images"):
        without.submit(ask("c", PROMPTS[1][0]))
    without.stop(drain_s=0)
    assert not without.facts.takes_images


def test_a_failure_ends_with_the_request_that_waited() -> None:
    """One that leaves before its step takes the failure along: the next one with such an image is tried."""
    made, tries, resources = torch.zeros(1, 4, 8), 0, Named()

    def embed(image: Image) -> torch.Tensor | None:
        nonlocal tries
        tries += 1
        return made if tries > 1 else None

    vectors = ImageVectors(embed, 1 << 20, resources)
    resources.found[SMALL.digest] = replace(SMALL)
    vectors.advance([SMALL.digest], 60.0)
    assert vectors.has(SMALL.digest)
    resources.found[SMALL.digest] = SMALL
    assert not vectors.has(SMALL.digest)
    assert vectors(SMALL) is made
