"""Prompts with images against transformers' own processors: the same ids, for images of many sizes."""

from __future__ import annotations

import base64
import copy
import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from PIL import Image as Pillow
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from engine.core.errors import ConfigError, InvalidRequestError
from engine.files.hf_config import HFConfig
from engine.images import most_images
from engine.llm.prompts import address_of
from engine.runtime.models.config_file import TOWERS, servable
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from engine.text.fields.chat import ImageSource
from engine.text.images.families import FAMILIES, ImageTokens
from engine.text.images.lfm2_vl import Lfm2VlImageProcessor
from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage, _load_processor
from engine.text.tokenizer import TextTokenizer, TokenizerConfig
from engine.text.tokenizer_files import load_tokenizer
from quire import LLM, SamplingParams
from server.app import create_app
from server.plan import prepare_all
from server.settings.app_config import AppConfig
from server.settings.flags import load_settings
from tests.cpu.test_images import CONFIGS, CONFIGS_BOTH_WAYS, SIGLIP
from tests.cpu.test_images import FAMILIES as IMAGES_OF_FAMILIES

POOL: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4}
SIZES = [(30, 20), (10, 10), (5, 7), (100, 40), (90, 95)]
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def tokenizer_of(marks: list[str]) -> Tokenizer:
    """One token a byte and one for two newlines, as in Gemma's and Qwen's, and marks."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    newline = letters[10]
    vocabulary = {letter: byte for byte, letter in letters.items()} | {newline * 2: 256}
    backend = Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return backend


def without_video(kind: Any) -> Any:
    """A processor without its parts for videos, which needs another library, and for sound."""

    class Seeing(transformers.ProcessorMixin):  # type: ignore[misc]
        def __init__(self, *parts: Any, **named: Any) -> None:
            super().__init__(*parts, **{name: part for name, part in named.items() if part is not None})

    class Still(kind, Seeing):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    Still.__name__ = kind.__name__
    return Still


def made(folder: Path, marks: list[str], config: Mapping[str, Any], processor: Any) -> ImagePreprocessor:
    """A checkpoint's folder, read."""
    backend = tokenizer_of(marks)
    values = {name: backend.token_to_id(value) if value in marks else value for name, value in config.items()}
    (folder / "config.json").write_text(json.dumps(values))
    processor.save_pretrained(folder)
    text = TextTokenizer(backend, TokenizerConfig(special_tokens={}, eos_token_ids=frozenset(), chat_template=None))
    found = ImagePreprocessor.of(folder, text)
    assert found is not None
    return found


def qwen(tokenizer: Any) -> Any:
    size = {"shortest_edge": 64, "longest_edge": 4096}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    return without_video(transformers.Qwen3VLProcessor)(images, tokenizer, None)


def gemma3(tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)


def idefics3(tokenizer: Any) -> Any:
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return transformers.Idefics3Processor(transformers.Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)


def smolvlm(tokenizer: Any) -> Any:
    """Whose module needs another library, which spells the numbers of a video's frames."""
    kind = without_video(transformers.SmolVLMProcessor)
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    with patch("transformers.models.smolvlm.processing_smolvlm.num2words", str):
        return kind(transformers.SmolVLMImageProcessorPil(**sizes), tokenizer, None, image_seq_len=4)


def internvl(tokenizer: Any) -> Any:
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, min_patches=1, max_patches=4)
    return without_video(transformers.InternVLProcessor)(images, tokenizer, None, image_seq_length=4)


def llava(tokenizer: Any) -> Any:
    size = {"height": 16, "width": 16}
    images = transformers.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=PINPOINTS)
    kind = without_video(transformers.LlavaOnevisionProcessor)
    return kind(images, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full")


def mistral3(tokenizer: Any, merge: int = 2) -> Any:
    """Pixtral's, whose module imports another image processor, which needs another library."""
    package = "transformers.models.pixtral"
    with patch.dict(sys.modules, {f"{package}.image_processing_pixtral": MagicMock()}):
        kind = import_module(f"{package}.processing_pixtral").PixtralProcessor
    images = transformers.PixtralImageProcessorPil(patch_size=4, size={"longest_edge": 64})
    return kind(images, tokenizer, patch_size=4, spatial_merge_size=merge)


def gemma4(tokenizer: Any) -> Any:
    tokenizer.pad_token = tokenizer.image_token  # it pads, though there is one prompt
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    return without_video(transformers.Gemma4Processor)(None, images, tokenizer, None)


class Lfm2Images:
    """In the place of transformers' processor, which needs another library: a tokenizer, and Quire's own images."""

    SETTINGS: ClassVar = {
        "tile_size": 32,
        "encoder_patch_size": 4,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_tiles": 6,
    }

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, self

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "Lfm2VlImageProcessorFast", **self.SETTINGS})
        )
        self._folder = folder

    def __call__(self, text: list[str], images: list[Pillow.Image], return_tensors: str) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        ours = ImagePreprocessor.of(self._folder, load_tokenizer(str(self._folder)))
        assert ours is not None
        made = [ours.prepare(np.asarray(image), "messages") for image in images]
        encode = ours.encoder(text[0], made)
        assert encode is not None
        arrays = [image.arrays for image, _ in made]
        most = max(each["pixel_values"].shape[1] for each in arrays)
        joined = {
            name: np.concatenate(
                [
                    np.pad(each[name], [(0, 0), (0, most - each[name].shape[1]), (0, 0)][: each[name].ndim])
                    if name != "spatial_shapes"
                    else each[name]
                    for each in arrays
                ]
            )
            for name in arrays[0]
        }
        return {
            "input_ids": torch.tensor([encode(text[0])]),
            **{name: torch.from_numpy(each) for name, each in joined.items()},
        }


PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32], [16, 48], [96, 96]]
TOWER = {"image_size": 16, "patch_size": 4}
CASES: dict[str, tuple[Callable[[Any], Any], list[str], dict[str, str], dict[str, Any], str, bool]] = {
    "qwen3_vl": (
        qwen,
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
        {},
        {"image_token_id": "<|image_pad|>", "vision_config": {"spatial_merge_size": 2}},
        "<|vision_start|><|image_pad|><|vision_end|>",
        False,
    ),
    "gemma3": (
        gemma3,
        ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "mm_tokens_per_image": 16,
            "vision_config": {},
        },
        "<start_of_image>",
        True,
    ),
    "gemma4": (
        gemma4,
        ["<|image>", "<|image|>", "<image|>", "<|video|>"],
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<",
            "eoa_token": ">",
        },
        {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "text_config": {"use_bidirectional_attention": "vision"},
            "vision_config": {},
        },
        "<|image|>",
        True,
    ),
    "mistral3": (
        mistral3,
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {},
        {"image_token_index": "[IMG]", "vision_config": {"patch_size": 4}, "spatial_merge_size": 2},
        "[IMG]",
        False,
    ),
    "llava": (
        partial(mistral3, merge=1),
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {},
        {"image_token_index": "[IMG]", "vision_config": {"model_type": "pixtral", "patch_size": 4}},
        "[IMG]",
        False,
    ),
    "idefics3": (
        idefics3,
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *ROWS],
        {},
        {"image_token_id": "<image>", "scale_factor": 2, "vision_config": TOWER},
        "<image>",
        True,
    ),
    "llava_onevision": (
        llava,
        ["<image>", "<video>"],
        {},
        {"image_token_index": "<image>", "vision_config": TOWER},
        "<image>",
        True,  # or each would be taken for the only one
    ),
    "internvl": (
        internvl,
        ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {
            "image_token_id": "<IMG_CONTEXT>",
            "downsample_ratio": 0.5,
            "vision_config": {"image_size": [16, 16], "patch_size": [4, 4]},
        },
        "<IMG_CONTEXT>",
        False,
    ),
}


OTHERS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), CASES["qwen3_vl"]),
    "smolvlm": (smolvlm, *CASES["idefics3"][1:]),
    "lfm2_vl": (
        Lfm2Images,
        [
            "<image>",
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)),
        ],
        {},
        {"image_token_id": "<image>", "downsample_factor": 2, "vision_config": {}},
        "<image>",
        False,
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ids_are_those_of_transformers(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    make, marks, named, config, mark, is_nested = CASES[kind]
    theirs = make(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(marks), extra_special_tokens=named or None))
    ours = made(tmp_path, marks, {"model_type": kind, **config}, theirs.image_processor)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    both = [Pillow.fromarray(pixels), Pillow.fromarray(pixels[:, ::-1].copy())]
    token_id = ours._token_id
    for images in (both[:1], both):
        text = "Look:\n" + " and\n\n".join([mark] * len(images)) + "\nwhat?"
        wanted = theirs(images=[images] if is_nested else images, text=[text])
        prepared = [ours.prepare(np.asarray(image), "messages", num=len(images)) for image in images]
        encode = ours.encoder(text, prepared)
        assert encode is not None
        ids = encode(text)
        assert ids == [int(each) for each in wanted["input_ids"][0]]
    for span, (image, _) in zip(ours.spans(ids, prepared), prepared, strict=True):
        assert ids[span.start] == ids[span.end - 1] == token_id
        assert ids[span.start : span.end].count(token_id) == image.num_tokens
        assert span.is_atomic == kind.startswith("gemma")
        assert kind in ("idefics3", "llava", "mistral3") or span.length == image.num_tokens
    assert prepared[0].image.digest != prepared[1].image.digest


def test_a_token_made_of_two_texts_is_no_place(tmp_path: Path) -> None:
    make, marks, named, config, mark, _ = CASES["gemma3"]
    theirs = make(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(marks), extra_special_tokens=named))
    ours = made(tmp_path, marks, {"model_type": "gemma3", **config}, theirs.image_processor)
    image = ours.prepare(np.zeros((32, 32, 3), np.uint8), "messages")
    text = "".join(ours.hide_marks(["<image_soft", "_token>"])) + mark
    encode = ours.encoder(text, [image])
    assert encode is not None
    [span] = ours.spans(encode(text), [image])
    assert span.start >= len("<image_soft_token>")
    assert span.length == 16


@pytest.mark.parametrize(
    ("size", "grid", "last"),
    [
        ((30, 20), (1, 1), (4, 8)),
        ((10, 10), (1, 1), (4, 4)),
        ((5, 7), (1, 1), (6, 4)),
        ((100, 40), (1, 3), (4, 12)),
        ((90, 95), (2, 2), (8, 6)),
        ((33, 70), (2, 1), (10, 4)),
        ((120, 90), (2, 3), (6, 8)),
    ],
)
def test_tiles_of_lfm2_vl(size: tuple[int, int], grid: tuple[int, int], last: tuple[int, int]) -> None:
    """As transformers' class has them, with its library: rows and columns of tiles, and the patches of the last part."""
    images = Lfm2VlImageProcessor(Lfm2Images.SETTINGS)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    made = images(images=[pixels])
    assert (int(made["rows"]), int(made["cols"])) == grid
    num = 1 if grid == (1, 1) else grid[0] * grid[1] + 1
    assert made["spatial_shapes"].tolist() == [[8, 8]] * (num - 1) + [list(last)]
    assert made["pixel_attention_mask"].sum(1).tolist() == [64] * (num - 1) + [last[0] * last[1]]
    tokens = ImageTokens({"downsample_factor": 2}, {}, "[IMG]", str)
    text = FAMILIES["lfm2_vl"].spelled(tokens, made)
    theirs = SimpleNamespace(
        image_token="[IMG]",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    assert text == Lfm2VlProcessor._build_image_tokens(theirs, *grid, 16, last[0] * last[1] // 4, True, True)


def test_patches_of_lfm2_vl() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    made = Lfm2VlImageProcessor(Lfm2Images.SETTINGS)(images=[pixels])
    assert made["spatial_shapes"].tolist() == [[4, 6]]
    for place, found in enumerate(made["pixel_values"][0]):
        row, column = divmod(place, 6)
        wanted = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] / 127.5 - 1
        np.testing.assert_allclose(found, wanted.ravel(), atol=1e-6)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant"
)
OF_FAMILIES = {name: each[0] for name, each in IMAGES_OF_FAMILIES.items()}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLConfig", CONFIGS["Qwen3VLConfig"]),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", CONFIGS["Qwen3VLMoeConfig"]),
    "qwen2_vl": ("Qwen2VLConfig", CONFIGS["Qwen2VLConfig"]),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", CONFIGS["Qwen2_5_VLConfig"]),
    "qwen3_5": ("Qwen3_5Config", CONFIGS["Qwen3_5Config"]),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", CONFIGS["Qwen3_5MoeConfig"]),
    "mistral3": ("Mistral3Config", OF_FAMILIES["Mistral3Config"]),
    "llava": ("LlavaConfig", OF_FAMILIES["LlavaConfig"]),
    "gemma3": ("Gemma3Config", CONFIGS_BOTH_WAYS["Gemma3Config"]),
    "gemma4": ("Gemma4Config", OF_FAMILIES["Gemma4Config vision"]),
    "idefics3": ("Idefics3Config", {**OF_FAMILIES["Idefics3Config"], "vision_config": SIGLIP, "scale_factor": 2}),
    "smolvlm": ("SmolVLMConfig", {**OF_FAMILIES["SmolVLMConfig"], "vision_config": SIGLIP, "scale_factor": 2}),
    "internvl": ("InternVLConfig", OF_FAMILIES["InternVLConfig"]),
    "lfm2_vl": ("Lfm2VlConfig", OF_FAMILIES["Lfm2VlConfig"]),
    "llava_onevision": (
        "LlavaOnevisionConfig",
        {**OF_FAMILIES["LlavaOnevisionConfig"], "image_grid_pinpoints": PINPOINTS},
    ),
}


class Theirs(NamedTuple):
    """A checkpoint with all its files, and transformers' processor and model of it."""

    folder: Path
    processor: Any
    model: Any
    mark: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def checkpoint(folder: Path, kind: str) -> Theirs:
    make, marks, named, ids, mark, _ = (CASES | OTHERS)[kind]
    backend = tokenizer_of([*marks, "<|im_start|>", "<|im_end|>"])
    end = backend.token_to_id("<|im_end|>")
    name, config = copy.deepcopy(TINY[kind])
    config["text_config"] |= {"vocab_size": 320, "max_position_embeddings": 1024, "bos_token_id": None}
    config["text_config"] |= {"eos_token_id": end, "pad_token_id": end}
    config |= {name: backend.token_to_id(token) for name, token in ids.items() if token in marks}
    torch.manual_seed(0)
    settings = getattr(transformers, name)(**config)
    model = transformers.AutoModelForImageTextToText.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.3 if "embed" in key else 0.15)
        for key, buffer in model.named_buffers():  # of Gemma 4's tower
            for name, value in {"_min": -0.9, "_max": 0.8, "std_bias": 0.3, "std_scale": 1.5}.items():
                if key.endswith(name):
                    buffer.fill_(value)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template=TEMPLATE.replace("MARK", mark),
        extra_special_tokens=named or None,
    )
    processor = make(tokenizer)
    for part in (model, processor):
        part.save_pretrained(folder / kind)
    return Theirs(folder / kind, processor, model, mark)


def picture(seed: int, width: int, height: int) -> Pillow.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def sent(part: str | Pillow.Image) -> dict[str, Any]:
    """A part of a message as a client sends it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    file = BytesIO()
    part.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


Parts = list[str | Pillow.Image]
CONVERSATIONS: list[Parts] = [
    [picture(1, 60, 40), "What?"],
    ["See", picture(2, 33, 70), "and", picture(3, 120, 90), "which is larger?"],
    [picture(1, 60, 40), "What?"],
]


def answer_of(theirs: Theirs, parts: Parts, **fields: Any) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of its answer, by transformers; `fields` are of `generate`."""
    _, processor, model, _ = theirs
    words = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    prompt = processor.tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False)
    images = [part for part in parts if not isinstance(part, str)]
    nested = (CASES | OTHERS)[theirs.folder.name][-1]
    asked = processor(text=[prompt], images=[images] if nested else images, return_tensors="pt")
    answered = model.generate(**asked, **{"max_new_tokens": 16, "do_sample": False, **fields})[0]
    ids = asked["input_ids"][0].tolist()
    return ids, answered[len(ids) :].tolist()


@pytest.mark.parametrize("kind", TINY)
def test_answers_are_those_of_transformers(folder: Path, kind: str) -> None:
    """From bytes of a request to tokens; the last one has its image in the prefix cache."""
    theirs = checkpoint(folder, kind)
    name = str(theirs.folder)
    engine = build_engine(EngineConfig(model=name, dtype="float32", **POOL), lambda progress: None)
    assert engine.facts.takes_images
    tokenizer = load_tokenizer(name)
    app = AppConfig(model=name, served_model_names=("tiny",), shutdown_timeout_s=0.0)
    application = create_app(engine, tokenizer, app, ImagePreprocessor.of(theirs.folder, tokenizer))
    with TestClient(application, base_url="http://127.0.0.1") as http:
        for parts in CONVERSATIONS:
            body = {"messages": [{"role": "user", "content": [sent(part) for part in parts]}], "temperature": 0}
            given = http.post("/v1/chat/completions", json={**body, "max_tokens": 16, "return_token_ids": True}).json()
            answer = given["choices"][0]["token_ids"]
            assert (given["prompt_token_ids"], answer) == answer_of(theirs, parts)
        assert given["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


def test_offline_answers_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    """Pillow's images, paths and addresses, as a prompt's data and in conversations, in one call."""
    theirs = checkpoint(folder, "qwen3_vl")
    image, other = picture(5, 60, 40), picture(6, 50, 50)
    other.save(tmp_path / "a.png")
    wanted = answer_of(theirs, [image, "or", other, "which?"])
    prompt = f"<|im_start|>user\n{theirs.mark}or{theirs.mark}which?<|im_end|>\n<|im_start|>assistant"
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(
        str(theirs.folder),
        dtype="float32",
        allowed_local_media_path=str(tmp_path),
        limit_mm_per_prompt={"image": 2},
        **POOL,
    ) as llm:
        data = {"image": [image, tmp_path / "a.png"]}
        outputs = llm.generate([{"prompt": prompt, "multi_modal_data": data}] * 3, params)
        messages = [
            {"role": "user", "content": [
                {"type": "image_pil", "image_pil": image}, {"type": "text", "text": "or"},
                {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}, {"type": "text", "text": "which?"},
            ]}
        ]  # fmt: skip
        outputs += llm.chat(messages, params)
        for output in outputs:
            assert output.prompt_token_ids == wanted[0]
            assert output.outputs[0].token_ids == wanted[1]
        assert llm.generate("no image", params)[0].outputs[0].token_ids
        assert llm._pictures is not None
        source = ImageSource(address_of(image))
        digests = [llm._pictures.read([source], "prompts", salt)[0].image.digest for salt in ("", "", "mine")]
        assert digests[0] == digests[1] != digests[2], "vectors are shared as K/V is"
        for given, words in (
            ([image] * 3, "3 images, and at most 2"),
            ([image], "places for 2 of 1 images"),
            ([image, 3], "An image is of type int"),
            ([image, "none.png"], "'none.png' cannot be read"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                llm.generate({"prompt": prompt, "multi_modal_data": {"image": given}}, params)
        truncated = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
        for ask in (
            lambda: llm.generate({"prompt": prompt, "multi_modal_data": data}, truncated),
            lambda: llm.chat(messages, truncated),
        ):
            with pytest.raises(InvalidRequestError, match="may cut an image in two"):
                ask()


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_log_probabilities_of_a_prompt_are_those_of_transformers(folder: Path, kind: str) -> None:
    """Of its images, too, and of what is between and behind them; in steps that are smaller than it."""
    theirs, images = checkpoint(folder, kind), [picture(2, 33, 70), picture(3, 60, 90)]
    prompt = f"<|im_start|>user\nSee{theirs.mark}and{theirs.mark}which?<|im_end|>\n<|im_start|>assistant"
    asked = theirs.processor(text=[prompt], images=[images] if CASES[kind][-1] else images, return_tensors="pt")
    [ids], place = asked["input_ids"], theirs.model.config.image_token_id
    types = "mm_token_type_ids" if kind == "qwen3_vl" else "token_type_ids"
    with torch.no_grad():
        logits = theirs.model(**{**asked, types: (asked["input_ids"] == place).int()}).logits[0]
    wanted = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(theirs.folder), dtype="float32", max_num_batched_tokens=32, **POOL) as llm:
        [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": images}}, params)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], ids[1:].tolist(), strict=True)
    found = torch.tensor([entries[token].logprob for entries, token in pairs if entries is not None])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_a_limit_of_no_images_loads_no_tower(folder: Path) -> None:
    """As in vLLM; nor does the server say that it takes some."""
    name, none = str(checkpoint(folder, "qwen3_vl").folder), {"image": 0}
    with LLM(name, dtype="float32", limit_mm_per_prompt=none, **POOL) as llm:
        assert not llm._engine.facts.takes_images
        data = {"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(1, 60, 40)}}
        with pytest.raises(InvalidRequestError, match="takes text alone"):
            llm.generate(data)
    for limit, memory in ((none, 0), ({"image": 1}, 256 << 20)):
        [plan] = prepare_all(load_settings([name, "--limit-mm-per-prompt", json.dumps(limit)]))
        assert plan.engine.image_cache_memory == memory


def test_options_of_the_processor(tmp_path: Path) -> None:
    make, marks, _, config, _, _ = CASES["qwen3_vl"]
    theirs = make(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(marks)))
    made(tmp_path, marks, {"model_type": "qwen3_vl", **config}, theirs.image_processor)
    text = TextTokenizer(
        tokenizer_of(marks), TokenizerConfig(special_tokens={}, eos_token_ids=frozenset(), chat_template=None)
    )
    pixels = np.zeros((64, 64, 3), np.uint8)

    def prepared(**options: Any) -> PreparedImage:
        found = ImagePreprocessor.of(tmp_path, text, options)
        assert found is not None
        return found.prepare(pixels, "messages")

    assert prepared().image.num_tokens == 64
    assert prepared(max_pixels=1024).image.num_tokens == 16
    assert prepared(size={"shortest_edge": 64, "longest_edge": 1024}).image.num_tokens == 16
    assert prepared(do_rescale=True).image.digest != prepared().image.digest, "options are part of the name"
    with pytest.raises(ConfigError, match="'max_pixel', which"):
        prepared(max_pixel=1024)
    plain = ImagePreprocessor.of(tmp_path, text)
    assert plain is not None
    for wishes, num in (
        ({"max_pixels": 1024}, 16),
        ({"max_pixels": 1, "min_pixels": 9000}, 1),
        ({"max_pixels": 1 << 40}, 64),  # the server's bound holds
        ({"min_pixels": 1 << 40}, 64),
    ):
        assert plain.prepare(pixels, "messages", wishes=wishes).image.num_tokens == num
    smaller = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    wanted = theirs(images=[Pillow.fromarray(pixels)], text=["<|image_pad|>"], **smaller)["image_grid_thw"]
    given = plain.prepare(pixels, "messages", wishes={"max_pixels": 1024}).image
    assert given.arrays["image_grid_thw"].tolist() == wanted.tolist()
    assert given.digest != plain.prepare(pixels, "messages").image.digest
    for wrong in ({"size": {}}, {"max_pixels": 0}, {"max_pixels": True}, {"max_pixels": 10.5}, {"fps": 1}):
        with pytest.raises(InvalidRequestError, match="may have min_pixels and max_pixels"):
            plain.prepare(pixels, "messages", wishes=wrong)
    with pytest.raises(InvalidRequestError, match="refuses 500 x 1 pixels"):
        plain.prepare(np.zeros((1, 500, 3), np.uint8), "messages")


def test_options_that_families_have_themselves(tmp_path: Path) -> None:
    """An operator's come before them, and before those of files; one whose text is not known is refused."""
    found = dict[str, Callable[..., ImagePreprocessor | None]]()
    for kind in ("internvl", "gemma3", "llava_onevision"):
        make, marks, named, config, _, _ = CASES[kind]
        theirs = make(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(marks), extra_special_tokens=named or None))
        (folder := tmp_path / kind).mkdir()
        text = made(folder, marks, {"model_type": kind, **config}, theirs.image_processor)._tokenizer
        found[kind] = partial(ImagePreprocessor.of, folder, text)
    pixels = np.zeros((20, 60, 3), np.uint8)
    counts = [
        ours.prepare(pixels, "messages").image.num_tokens
        for kind, options in (
            ("internvl", {}),
            ("internvl", {"crop_to_patches": False}),
            ("llava_onevision", {}),
            ("llava_onevision", {"image_grid_pinpoints": [[16, 16]]}),
        )
        if (ours := found[kind](options)) is not None
    ]
    theirs = llava(PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(["<image>", "<video>"])))
    assert counts[:3] == [16, 4, len(theirs(images=[Pillow.fromarray(pixels)], text=["<image>"])["input_ids"][0])]
    theirs.image_processor.image_grid_pinpoints = [[16, 16]]
    assert counts[3] == len(theirs(images=[Pillow.fromarray(pixels)], text=["<image>"])["input_ids"][0]) < counts[2]
    with pytest.raises(ConfigError, match="do_pan_and_scan cuts images into crops"):
        found["gemma3"]({"do_pan_and_scan": True})


def test_merged_patches_of_gemma_4_are_those_of_transformers() -> None:
    """Whose class needs another library, and whose function that merges does not."""
    parts = ("", ".transforms", ".transforms.v2")
    with patch.dict(sys.modules, {f"torchvision{part}": MagicMock() for part in parts}):
        merge = import_module("transformers.models.gemma4_unified.image_processing_gemma4_unified").patches_merge
    own = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    ours = _load_processor(None, {"image_processor_type": "Gemma4UnifiedImageProcessor", **own}, {})
    single = transformers.Gemma4ImageProcessorPil(**own)
    for width, height in SIZES:
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        found, small = (each(images=[pixels], return_tensors="pt") for each in (ours, single))
        [num] = found["num_soft_tokens_per_image"].tolist()
        assert [num] == small["num_soft_tokens_per_image"].tolist()
        patches, places = merge(small["pixel_values"][:, : 9 * num], small["image_position_ids"][:, : 9 * num], num)
        for name, merged in (("pixel_values", patches), ("image_position_ids", places)):
            torch.testing.assert_close(found[name][:, :num], merged)
        assert (found["image_position_ids"][:, num:] == -1).all()
    values = transformers.Gemma4UnifiedConfig().to_dict()
    for config in (values, {"model_type": "gemma4_unified"}):  # whose text is of that default
        assert ImageTokens(config, {}, "", str).is_atomic
    values["text_config"]["use_bidirectional_attention"] = None
    assert not ImageTokens(values, {}, "", str).is_atomic


def test_a_width_that_could_be_channels_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Wide or tall, an image is the same but for its sides; nothing is logged for an operator to worry about."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        processor = _load_processor(None, {"image_processor_type": "Gemma4ImageProcessor"}, {"max_soft_tokens": 70})
        places = [
            processor(images=[np.zeros(shape, np.uint8)], input_data_format="channels_last", return_tensors="np")
            for shape in ((3, 48, 3), (48, 3, 3))
        ]
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    wide, tall = [each["image_position_ids"] for each in places]
    assert sorted(map(tuple, wide[0].tolist())) == sorted((x, y) for y, x in tall[0].tolist())
    assert not caplog.messages


def test_a_model_whose_files_lack_something_is_served_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = TextTokenizer(
        tokenizer_of(["<|image_pad|>"]),
        TokenizerConfig(special_tokens={}, eos_token_ids=frozenset(), chat_template=None),
    )
    for config in ("{}", '{"model_type": "qwen3_vl", "image_token_id": 257, "vision_config": {}}'):
        (tmp_path / "config.json").write_text(config)
        assert ImagePreprocessor.of(tmp_path, text) is None
        assert "text alone is served: its image processor cannot be loaded (" in caplog.messages.pop()
        caplog.clear()


@pytest.mark.parametrize(("tower", "kind"), [("pixtral", "pixtral"), ("clip_vision_model", "llava")])
def test_of_llavas_towers_pixtrals_sees(tower: str, kind: str) -> None:
    values = {"model_type": "llava", "text_config": {"model_type": "mistral"}, "vision_config": {"model_type": tower}}
    assert servable(HFConfig(values, "config.json")).values["text_of"] == kind
    assert (kind in TOWERS) is (tower == "pixtral")


def test_the_most_images_of_a_prompt() -> None:
    assert most_images({}) == 32
    assert most_images({"image": 3, "video": 1}) == 3
    assert most_images({"image": {"count": 2, "width": 512}}) == 2
    for wrong in ("2", -1, True, 1.5):
        with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
            most_images({"image": wrong})
    with pytest.raises(ConfigError, match="limit-mm-per-prompt has no key 'images'; did you mean 'image'"):
        most_images({"images": 4})
