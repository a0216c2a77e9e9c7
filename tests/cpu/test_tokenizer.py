"""Tokenizers from GGUF files and Hugging Face folders, against transformers' own or the definition of the algorithm."""

from __future__ import annotations

import inspect
import json
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from engine.core.errors import ConfigError, InvalidRequestError, ModelLoadError
from engine.files.gguf_header import read_header
from engine.runtime.models.encoder_families import ENCODERS
from engine.runtime.models.families import FAMILIES
from engine.sources.model_source import find_model
from engine.text import tokenizer_files
from engine.text.chat_template import ChatTemplate
from engine.text.generation_config import read_sampling, sampling_of
from engine.text.gguf_tokenizer import WORDS, TokenType, build_tokenizer
from engine.text.tokenizer import TextTokenizer
from engine.text.tokenizer_files import load_tokenizer
from engine.text.types import SamplingDefaults

TRICKY = (
    "Hello 1234567 world\n\n  x",
    "don't DON'T we'LL it's",
    "  leading, trailing  \t\r\n\r\n",
    "naïve café, and decomposed: cafe\u0301",
    "日本語のテキスト 🎉👩‍👩‍👧 ½ ²",
    "x=12.5;y[3]:=f(a,b)//c  # comment",
    "a\u00a0b\u200bc\ufeff",
    "",
)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def render(tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]] = CHAT, **kwargs: Any) -> str:
    final = kwargs.pop("continue_final_message", False)
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render(
        messages, add_generation_prompt=not final, continue_final_message=final, template_kwargs=kwargs
    )


@pytest.fixture(scope="module")
def smollm() -> TextTokenizer:
    return load_tokenizer(find_model(None).path)


# -- the embedded model ------------------------------------------------------------------------------------------------


def test_smollm2_chat_ids(smollm: TextTokenizer) -> None:
    """The ids that the model's published tokenizer and template give."""
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]  # fmt: skip
    user = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    assert smollm.encode(render(smollm), add_special_tokens=False) == [*system, *user, 1, 520, 9531, 198]
    assert smollm.encode(render(smollm), add_special_tokens=True) == [*system, *user, 1, 520, 9531, 198]  # no BOS
    assert smollm.eos_token_ids == {0, 2}
    assert smollm.vocab_size == 49152


@pytest.mark.parametrize("text", TRICKY)
def test_bytes_and_text_round_trip(smollm: TextTokenizer, text: str) -> None:
    ids = smollm.encode(text + "<|im_end|>", add_special_tokens=False)
    assert ids[-1] == 2
    assert b"".join(smollm.token_bytes(i) for i in ids).decode() == text + "<|im_end|>"
    assert smollm.decode(ids, skip_special_tokens=False) == text + "<|im_end|>"
    assert smollm.decode(ids, skip_special_tokens=True) == text


def test_digits_stand_alone(smollm: TextTokenizer) -> None:
    assert [smollm.token_bytes(i) for i in smollm.encode(" 2024", add_special_tokens=False)] == [
        b" ", b"2", b"0", b"2", b"4",
    ]  # fmt: skip


def test_an_id_without_a_token_and_half_a_character(smollm: TextTokenizer) -> None:
    assert smollm.token_bytes(10**6) == b""
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        smollm.encode("\ud83d", add_special_tokens=False)


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


def reference(pattern: str, *, nfc: bool, ignore_merges: bool) -> tokenizers.Tokenizer:
    """A small tokenizer trained with a pattern of transformers' own."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.normalizer = normalizers.NFC() if nfc else normalizers.Sequence([])
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TRICKY * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "<|begin|>", "<|end|>"],
        "token_type": [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * 2,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def patterns() -> dict[str, tuple[str, bool, bool]]:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    llama3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    return {"qwen2": (PRETOKENIZE_REGEX, True, False), "llama-bpe": (llama3, False, True)}


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_a_gguf_tokenizer_equals_its_original(pre: str) -> None:
    pattern, nfc, ignore_merges = patterns()[pre]
    original = reference(pattern, nfc=nfc, ignore_merges=ignore_merges)
    built = build_tokenizer(gguf_metadata(original, pre))
    for text in TRICKY:
        assert built.encode(text, add_special_tokens=False).ids == original.encode(text).ids
    bos = [built.token_to_id("<|begin|>")] if pre == "llama-bpe" else []
    assert built.encode("a", add_special_tokens=True).ids == bos + original.encode("a").ids
    assert built.encode("<|end|>", add_special_tokens=False).ids == [built.token_to_id("<|end|>")]


def test_the_file_decides_about_bos_and_eos() -> None:
    original = reference(patterns()["qwen2"][0], nfc=True, ignore_merges=False)
    built = build_tokenizer(gguf_metadata(original, "llama-bpe", add_bos_token=False, add_eos_token=True))
    assert built.encode("a").ids == [*original.encode("a").ids, built.token_to_id("<|end|>")]


def test_gpt2_is_transformers_byte_level() -> None:
    original = reference(patterns()["qwen2"][0], nfc=False, ignore_merges=False)
    original.normalizer = normalizers.Sequence([])
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built = build_tokenizer(gguf_metadata(original, "gpt-2"))
    for text in TRICKY:
        assert built.encode(text).ids == original.encode(text).ids


def words_of(split: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in split.pre_tokenize_str(text)]


def test_words_are_those_of_transformers_patterns() -> None:
    """Of every name that transformers knows as well."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    assert len(GGUF_PRE_TOKENIZER_SPLITS) > 20
    assert GGUF_PRE_TOKENIZER_SPLITS.keys() <= WORDS.keys()
    cased = "CamelCase McDONALD's ÀÉÎÕ straßE ǅungla 12345678 a//\n\n हिन्दी"
    for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items():
        original = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for text in (*TRICKY, cased):
            assert words_of(WORDS[name].split(), text) == words_of(original, text), name


# Published vocabularies with these names gave the ids of their tokenizer.json for llama.cpp's test texts: gpt-2, mpt, falcon,
# starcoder, refact, command-r, deepseek-llm, deepseek-coder, llama-bpe, qwen2.
SENTENCE = "I'LL pay 12345 CamelCase's $x//\n\n日本ab  end "
SPLITS = {
    "glm4": "I|'LL| pay| |123|45| CamelCase|'s| $|x|//\n\n|日本ab| | end| ",
    "deepseek-v3": "I|'LL| pay| |123|45| CamelCase|'s| $|x|//\n\n|日本|ab| | end| ",
    "deepseek-llm": "I|'|LL| pay| |1|2|3|4|5| CamelCase|'|s| $|x|//|\n|\n|日本|ab| | end| ",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4|5| CamelCase|'|s| $|x|//|\n|\n|日本|ab| | end| ",
    "kimi-k2": "I'LL| pay| |123|45| Camel|Case's| $|x|//\n\n|日本|ab| | end| ",
    "falcon": "I|'|LL| pay| |123|45| CamelCase|'|s| |$|x|//|\n|\n|日本ab| | end| ",
    "default": "I|'|LL| pay| |123|45| CamelCase|'|s| |$|x|//|\n|\n|日本ab| | end| ",  # ids were compared with llama.cpp's
    "smollm": "I|'|LL| pay| |1|2|3|4|5| CamelCase|'s| $|x|//|\n|\n|日本ab| | end| ",
    "olmo": "I|'|LL| pay| 12345| CamelCase|'s| $|x|//|\n|\n|日本ab| | end| ",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_by_the_name_of_a_file(pre: str) -> None:
    assert words_of(WORDS[pre].split(), SENTENCE) == SPLITS[pre].split("|")


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_file_that_does_not_name_its_words_is_read_as_llama_cpp_does(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = gguf_metadata(reference(patterns()["qwen2"][0], nfc=False, ignore_merges=False), "qwen2")
    assert build_tokenizer(metadata)
    assert not caplog.records
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    else:
        metadata["tokenizer.ggml.pre"] = pre
    built = build_tokenizer(metadata)
    assert words_of(built.pre_tokenizer, SENTENCE) == SPLITS["default"].split("|")
    (said,) = caplog.messages
    assert "does not name its pre-tokenizer" in said
    assert "with --tokenizer" in said


@pytest.mark.parametrize(("pre", "is_composed"), [("olmo", True), ("qwen35", True), ("gpt-2", False)])
def test_composed_characters_are_a_habit_of_some(pre: str, is_composed: bool) -> None:
    original = reference(patterns()["qwen2"][0], nfc=True, ignore_merges=False)
    built = build_tokenizer(gguf_metadata(original, pre))
    assert (built.encode("cafe\u0301").ids == built.encode("café").ids) is is_composed


# -- SentencePiece BPE -------------------------------------------------------------------------------------------------

PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "ca", "cab", "▁▁", "▁b", "aa"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
SPM_TYPES = [
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.CONTROL,
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * len(PIECES),
]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.token_type": [int(kind) for kind in SPM_TYPES],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(PIECES.index(piece)) - 10 * (len(piece) == 1) for piece in PIECES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip


def sentence_piece(text: str) -> list[str]:
    """The definition: merge the neighbours that make the best-scored piece, the leftmost first, until none is left."""
    scores = dict(zip(SPM_TOKENS, SPM["tokenizer.ggml.scores"], strict=True))
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not joined:
            break
        at = min(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [part for s in symbols for part in ([s] if s in PIECES else [f"<0x{byte:02X}>" for byte in s.encode()])]


@given(st.text(alphabet="abc é日"))
def test_sentence_piece_merges_as_defined(text: str) -> None:
    assert build_tokenizer(SPM).encode(text, add_special_tokens=False).tokens == sentence_piece(text)


@given(st.text(alphabet="abc é日"))
def test_merges_in_place_of_scores(text: str) -> None:
    """As Gemma 4's files have them; a text begins without a space there."""
    without = SPM | {"tokenizer.ggml.add_space_prefix": False}
    pieces = sorted((piece for piece in PIECES if len(piece) > 1), key=PIECES.index)
    merges = [f"{piece[:cut]} {piece[cut:]}" for piece in pieces for cut in range(1, len(piece))]
    found = build_tokenizer(without | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges})
    assert found.encode(text).ids == build_tokenizer(without).encode(text).ids
    assert found.decode(found.encode(text).ids) == text


def test_sentence_piece_text_and_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_gguf(tmp_path / "spm.gguf", SPM)))
    ids = tokenizer.encode("ab é cab", add_special_tokens=True)
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab é cab"
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b"<s> ab \xc3\xa9 cab"
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.chat_template is None


UNIGRAM = [
    ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0), ("\u2581ab", -2.5), ("ab", -4.0),
    ("a", -5.0), ("b", -5.0), ("c", -5.5), ("\u2581c", -3.5), ("\u00e9", -6.0), ("bc", -4.5), ("<mask>", 0.0),
]  # fmt: skip


@given(st.text(alphabet="abc \u00e9\u65e5\n\t"), st.text(alphabet="ab c"))
def test_unigram_is_xlm_rs_own(text: str, other: str) -> None:
    """As in GGUF files of bge-m3 and multilingual E5; alone, and as a pair."""
    from transformers import XLMRobertaTokenizerFast

    kinds = {
        0: TokenType.CONTROL,
        1: TokenType.CONTROL,
        2: TokenType.CONTROL,
        3: TokenType.UNKNOWN,
        13: TokenType.CONTROL,
    }
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [token for token, _ in UNIGRAM],
        "tokenizer.ggml.scores": [score for _, score in UNIGRAM],
        "tokenizer.ggml.token_type": [int(kinds.get(i, TokenType.NORMAL)) for i in range(len(UNIGRAM))],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    built, original = build_tokenizer(metadata), XLMRobertaTokenizerFast(vocab=UNIGRAM)._tokenizer
    for found, expected in (
        (built.encode(text), original.encode(text)),
        (built.encode(text, other), original.encode(text, other)),
    ):
        assert found.ids == expected.ids
    assert built.decode(built.encode(text).ids) == original.decode(original.encode(text).ids)


def test_a_unigram_without_scores_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="2 tokens but 0 scores"):
        build_tokenizer({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a", "b"]})


# -- files that cannot be used -----------------------------------------------------------------------------------------


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_is_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    assert SPM.items() <= read_header(write_gguf(tmp_path / "m.gguf", SPM)).metadata.items()


def test_every_truncation_of_a_header_is_told(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]})
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(ModelLoadError, match="is truncated or not a GGUF file"):
            read_header(cut)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04" + bytes(99), b"GGUF" + struct.pack("<IQQ", 9, 0, 0), b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62)]
)  # fmt: skip
def test_another_file_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is truncated or not a GGUF file"):
        read_header(file)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "holds no tokenizer"),
        ({"model": "gpt2", "pre": "viking", "tokens": ["a"]}, "unsupported kind gpt2 with pre-tokenizer 'viking'"),
        ({"model": "bert", "tokens": ["a"]}, "names no token that begins or ends a text"),
        ({"model": "rwkv", "tokens": ["a"]}, "unsupported kind rwkv"),
        ({"model": "llama", "tokens": ["a"]}, "1 tokens but 0 scores"),
        ({"model": "gpt2", "pre": "qwen2", "tokens": ["a"], "merges": ["a x"]}, "inconsistent"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import PreTrainedTokenizerFast

    backend = reference(patterns()["qwen2"][0], nfc=True, ignore_merges=False)
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    saved.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    saved.save_pretrained(tmp_path)
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 9}))
    return tmp_path


def test_a_folder_gives_what_transformers_gives(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    for text in TRICKY:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert render(ours) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.eos_token_ids == {7, 8, 9, theirs.eos_token_id}
    assert ours.vocab_size == len(theirs)


# By class of transformers: the kind of model whose tokenizer it is, and what its vocabulary is made of.
CLASSES = {
    "Qwen2Tokenizer": ("qwen2", "bytes"),
    "Qwen3_5Tokenizer": ("qwen3_5", "bytes"),
    "GPT2Tokenizer": ("gpt2", "bytes"),
    "GPTNeoXTokenizer": ("olmoe", "bytes"),
    "RobertaTokenizer": ("roberta", "bytes"),
    "LlamaTokenizer": ("llama", "letters"),
    "GemmaTokenizer": ("gemma3_text", "letters"),
    "BertTokenizer": ("bert", "words"),
    "MPNetTokenizer": ("mpnet", "words"),
    "XLMRobertaTokenizer": ("xlm-roberta", "scores"),
    "CamembertTokenizer": ("camembert", "scores"),
    "PreTrainedTokenizerFast": ("lfm2", "whole"),
}


def vocabulary(kind: str) -> dict[str, Any]:
    """What a class of transformers makes a small tokenizer of."""
    backend = reference(patterns()["qwen2"][0], nfc=True, ignore_merges=False)
    model = json.loads(backend.to_str())["model"]
    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    letters = sorted({letter for text in TRICKY for letter in text.replace(" ", "▁")} | {"▁"})
    if kind == "bytes":
        return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}
    if kind == "letters":
        codes = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens = [*marks, *codes, *letters, "▁w", "▁wo"]
        return {"vocab": {token: at for at, token in enumerate(tokens)}, "merges": [("▁", "w"), ("▁w", "o")]}
    if kind == "words":
        return {"vocab": {token: at for at, token in enumerate([*marks, *letters, *("##" + each for each in letters)])}}
    if kind == "scores":
        return {"vocab": [(token, -float(at)) for at, token in enumerate([*marks, *letters, "▁wo", "rld"])]}
    return {"tokenizer_object": backend, "bos_token": "<s>"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire"


@pytest.mark.parametrize("name", CLASSES)
def test_what_transformers_made_of_a_folder_is_kept(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start has the same ids and text without it."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    model_type, kind = CLASSES[name]
    made = tokenizer_class_from_name(name)(**vocabulary(kind))
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}"
    )
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 5}))
    theirs, first = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    assert type(theirs).__name__ == ("TokenizersBackend" if kind == "whole" else name)
    with monkeypatch.context() as without:
        without.setattr(tokenizer_files, "_by_transformers", None)
        ours = load_tokenizer(str(tmp_path))
    for text in [*TRICKY, "<s>a</s>[SEP]<mask>"]:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == first.encode(text, add_special_tokens=True) == theirs.encode(text)
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    pairs = [each.encode(("a b", "c"), add_special_tokens=True) for each in (ours, first)]
    assert pairs == [theirs("a b", "c")["input_ids"]] * 2
    assert render(ours) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    for what in ("eos_token_ids", "special_tokens", "marks", "vocab_size", "description"):
        assert getattr(ours, what) == getattr(first, what)
    assert ours.vocabulary(600) == first.vocabulary(600)


def test_every_served_family_has_a_class_of_these() -> None:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    types = {*FAMILIES, *ENCODERS, *(kind for kind, _ in CLASSES.values())}
    assert {TOKENIZER_MAPPING_NAMES.get(kind, "TokenizersBackend") for kind in types} <= {*CLASSES, "TokenizersBackend"}


def test_what_is_kept_is_of_the_files_as_they_are(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is of other files, damaged, or another user's is read again, and so is what no file can say."""
    read, num_read = tokenizer_files._by_transformers, 0

    def count(path: Path) -> Any:
        nonlocal num_read
        num_read += 1
        return read(path)

    monkeypatch.setattr(tokenizer_files, "_by_transformers", count)
    caplog.set_level("INFO")
    for _ in range(2):
        wanted = load_tokenizer(str(folder)).encode(TRICKY[0], add_special_tokens=True)
    assert caplog.messages == ["tokenizer: read by transformers, and kept for the next start"]
    assert num_read == 1
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 11}))
    assert 11 in load_tokenizer(str(folder)).eos_token_ids
    assert num_read == 2
    for content in (b"", b"{}", b"[]\n{}", b'{"eos_token_ids": []}\n{}', b"\xff"):
        for kept in cache.iterdir():
            kept.write_bytes(content)
        assert load_tokenizer(str(folder)).encode(TRICKY[0], add_special_tokens=True) == wanted
    assert num_read == 7
    for kept in cache.iterdir():
        kept.chmod(0o602)  # others may write to it
    for _ in range(2):
        load_tokenizer(str(folder))
    assert num_read == 8
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
    num_kept = len(list(cache.iterdir()))
    split = [load_tokenizer(str(folder)).encode("<|begin|>", add_special_tokens=False) for _ in range(2)]
    assert len(split[0]) > 1
    assert split[0] == split[1]
    assert (num_read, len(list(cache.iterdir()))) == (10, num_kept)


def test_few_tokenizers_are_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "_MAX_KEPT", 2)
    for number in range(4):
        (folder / "config.json").write_text(json.dumps({"eos_token_id": number}))
        load_tokenizer(str(folder))
        assert len(list(cache.iterdir())) == min(number + 1, 2)
    monkeypatch.setattr(tokenizer_files, "_by_transformers", None)
    assert 3 in load_tokenizer(str(folder)).eos_token_ids


def test_a_cache_that_cannot_be_written_costs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tokenizer(str(folder)).encode("a", add_special_tokens=True)


def test_the_models_sampling_is_read_from_its_folder_and_overridden(folder: Path) -> None:
    assert load_tokenizer(str(folder)).sampling_defaults == SamplingDefaults()
    recommended = read_sampling(folder)
    assert recommended == SamplingDefaults(temperature=0.6, top_p=0.9)
    asked = sampling_of({"top_p": 0.5, "max_new_tokens": 7}, recommended, "here")
    assert load_tokenizer(str(folder), sampling=asked).sampling_defaults == SamplingDefaults(
        temperature=0.6, top_p=0.5, max_new_tokens=7
    )
    assert sampling_of({"do_sample": False, "top_k": 3}, recommended, "here").temperature == 0
    with pytest.raises(ModelLoadError, match="here: 'top_k' is 'x', not a number"):
        sampling_of({"top_k": "x"}, recommended, "here")


def test_a_template_given_by_the_user_replaces_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_tokenizer(f"~/{folder.name}").vocab_size == load_tokenizer(str(folder)).vocab_size
    assert render(load_tokenizer(str(folder), chat_template="{{ messages|length }} {{ eos_token }}")) == "1 <|end|>"


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: .* no tokenizer.json; .*--tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


# -- chat templates ----------------------------------------------------------------------------------------------------


def chat(source: str, messages: Sequence[Mapping[str, Any]] = CHAT, *, final: bool = False, **kwargs: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(
        messages, add_generation_prompt=not final, continue_final_message=final, template_kwargs=kwargs
    )


def test_templates_have_what_transformers_gives_them() -> None:
    assert (
        chat("{{ bos_token }}{{ messages[0] | tojson }}")
        == '<s>{"role": "user", "content": "What is the capital of France?"}'
    )
    assert chat("{% if tools is not none or documents %}x{% endif %}{{ add_generation_prompt }}") == "True"
    assert chat("{% generation %}{{ depth }}{% endgeneration %}", depth=3) == "3"
    assert len(chat("{{ strftime_now('%Y') }}")) == 4
    assert chat("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"


def test_a_continued_message_ends_where_its_text_ends() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
    conversation = [*CHAT, {"role": "assistant", "content": "It is "}]
    assert chat(source, conversation, final=True).endswith("\n<assistant>It is ")
    with pytest.raises(InvalidRequestError, match="leaves out the last message"):
        chat("{{ messages[0].content }}", conversation, final=True)
    with pytest.raises(InvalidRequestError, match="needs a last message"):
        chat(source, [{"role": "assistant", "content": None}], final=True)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_is_the_requests_fault(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        chat(source)


def test_kwargs_cannot_replace_the_conversation() -> None:
    with pytest.raises(InvalidRequestError, match="may not set 'messages'"):
        ChatTemplate("x", {}).render(
            CHAT, add_generation_prompt=True, continue_final_message=False, template_kwargs={"messages": []}
        )


def test_a_broken_template_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*--chat-template"):
        ChatTemplate("{% if %}", {})


def test_a_long_text_is_encoded_beside_other_threads() -> None:
    tokenizer = load_tokenizer(find_model(None).path)
    text = "".join(f" word{number}" for number in range(40_000))  # some tenths of a second
    encoding = threading.Thread(target=tokenizer.encode, args=(text,), kwargs={"add_special_tokens": False})
    encoding.start()
    num_turns = 0
    while encoding.is_alive():
        time.sleep(0)
        num_turns += 1
    assert num_turns > 100  # with the GIL held: none while it encodes
