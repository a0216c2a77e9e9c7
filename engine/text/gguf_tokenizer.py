"""Builds a `tokenizers.Tokenizer` from a GGUF file's metadata.

Byte-level BPE ("gpt2", which splits a text into words first, as gguf_words.json lists) and SentencePiece BPE ("llama",
scores instead of merges; "gemma4", merges), BERT's ("bert"), and XLM-R's Unigram ("t5"). An unknown kind is refused: a nearly right tokenizer makes a model subtly worse.

The file has a row for each way to split: the names of `tokenizer.ggml.pre`, each of which stands for all tokenizers that
give the same ids for one test text, whichever model they belong to; and steps one after the other, a regular expression
of the models' tokenizer.json whose matches and gaps are kept, or a class of `tokenizers` with its arguments. The last row
is for files that name none, which llama.cpp splits so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.pre_tokenizers import PreTokenizer, Split

from engine.core.errors import ModelLoadError
from engine.system.calls import foreign_code
from engine.system.regular_file import read_json

log = logging.getLogger("quire.tokenizer")

DEFAULT = "default"  # stands for the name of files that name none


class Words(NamedTuple):
    """How a family of tokenizers splits a text, and two habits of its merging."""

    steps: Sequence[Any]
    is_composed: bool = False  # characters are composed first (NFC)
    is_whole_first: bool = False  # a word that is a token is that token, whatever the merges
    has_bos: bool = False  # a text begins with a token for that, if the file does not say

    def split(self) -> PreTokenizer:
        """Return the splits one after the other."""
        return pre_tokenizers.Sequence(
            [
                Split(Regex(step), behavior="isolated")
                if isinstance(step, str)
                else getattr(pre_tokenizers, step[0])(**step[1])
                for step in self.steps
            ]
        )


_ROWS = read_json(Path(__file__).with_name("gguf_words.json"))
WORDS: Mapping[str, Words] = {name: Words(**row) for row in _ROWS for name in row.pop("names").split()}


class TokenType(IntEnum):
    """The token types of a GGUF file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES: Mapping[str, tuple[type, ...]] = {
    "chat_template": (str,),
    "ggml.model": (str,),
    "ggml.pre": (str,),
    "ggml.tokens": (list, str),
    "ggml.merges": (list, str),
    "ggml.scores": (list, float),
    "ggml.token_type": (list, int),
    "ggml.add_bos_token": (bool,),
    "ggml.add_eos_token": (bool,),
    "ggml.add_space_prefix": (bool,),
    "ggml.precompiled_charsmap": (list, int),
    **{f"ggml.{role}_token_id": (int,) for role in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}


def check_types(metadata: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a key of the tokenizer whose value has the wrong type."""
    for key, (kind, *items) in _TYPES.items():
        value = metadata.get(f"tokenizer.{key}")
        is_right = value is None or type(value) is kind
        if isinstance(value, list) and items:
            is_right = is_right and all(
                issubclass(found, items[0]) and found is not bool for found in {*map(type, value)}
            )
        if not is_right or (kind is int and value is not None and value < 0):
            wanted = f"a list of {items[0].__name__}" if items else kind.__name__
            raise ModelLoadError(f"The GGUF file's 'tokenizer.{key}' is {str(value)!r:.80}; it must be {wanted}.")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file's metadata. Raises ModelLoadError."""
    check_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    if metadata["tokenizer.ggml.model"] in ("llama", "gemma4"):
        tokenizer, has_bos = _sentence_piece_bpe(metadata, tokens), True
    elif metadata["tokenizer.ggml.model"] == "bert":
        tokenizer, has_bos = _word_piece(metadata, tokens), True
    elif metadata["tokenizer.ggml.model"] == "t5":
        tokenizer, has_bos = _unigram(metadata, tokens), True
    else:
        pre = _pre(metadata)
        tokenizer, has_bos = _byte_level_bpe(metadata, tokens, WORDS[pre]), WORDS[pre].has_bos
        if pre == DEFAULT:
            log.warning(
                "The GGUF file does not name its pre-tokenizer ('tokenizer.ggml.pre'), so a text is split as llama.cpp splits "
                "it then, perhaps not as the model was trained; name the model's Hugging Face folder or id with --tokenizer, "
                "or convert the model again."
            )
    _add_special_tokens(tokenizer, metadata, tokens)
    if metadata["tokenizer.ggml.model"] != "bert":  # which has them already
        _add_beginning_and_end(tokenizer, metadata, tokens, has_bos)
    return tokenizer


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for metadata of which no tokenizer can be built."""
    check_types(metadata)
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ModelLoadError("The GGUF file holds no tokenizer; name one with --tokenizer.")
    model = metadata.get("tokenizer.ggml.model")
    if model in ("llama", "gemma4", "bert", "t5") or (model == "gpt2" and _pre(metadata) in WORDS):
        return
    kind = f"{model} with pre-tokenizer {_pre(metadata)!r}" if model == "gpt2" else model
    raise ModelLoadError(
        f"The GGUF file's tokenizer is of the unsupported kind {kind}; name the model's Hugging Face folder or id with "
        "--tokenizer."
    )


def _pre(metadata: Mapping[str, Any]) -> str:
    return metadata.get("tokenizer.ggml.pre") or DEFAULT


def special_token(metadata: Mapping[str, Any], role: str) -> int | None:
    """Return the id of a role such as "bos" or "eot", or None without a valid one."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if token_id is not None and token_id < len(metadata["tokenizer.ggml.tokens"]) else None


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], words: Words) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges(metadata)
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=words.is_whole_first))
    if words.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Return BERT's tokenizer; llama.cpp marks words that begin, where BERT marks those that go on, and writes small letters."""
    kinds, mark = metadata.get("tokenizer.ggml.token_type", ()), int(TokenType.CONTROL)
    control = {token_id for token_id, kind in enumerate(kinds) if kind == mark}
    vocabulary = {
        token if token_id in control else token[1:] if token.startswith("▁") else f"##{token}": token_id
        for token_id, token in enumerate(tokens)
    }
    first, last = special_token(metadata, "bos"), special_token(metadata, "seperator")
    first = special_token(metadata, "cls") if first is None else first
    last = special_token(metadata, "eos") if last is None else last
    unknown = special_token(metadata, "unknown")
    if first is None or last is None or unknown is None:
        raise ModelLoadError(
            "The GGUF file's tokenizer names no token that begins or ends a text; name one with --tokenizer."
        )
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=tokens[unknown], max_input_chars_per_word=100))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing((tokens[last], last), (tokens[first], first))
    return tokenizer


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges", ()))
    return [(left, right) for left, _, right in pairs]


def _sentence_piece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    has_merges = metadata["tokenizer.ggml.model"] == "gemma4"
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = special_token(metadata, "unknown")
    tokenizer = Tokenizer(
        _bpe(
            vocabulary,
            _merges(metadata) if has_merges else _merges_of_scores(vocabulary, _scores(metadata, tokens)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _scores(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Sequence[float]:
    scores: Sequence[float] = metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise ModelLoadError(f"The GGUF file's tokenizer has {len(tokens)} tokens but {len(scores)} scores.")
    return scores


def _unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Return XLM-R's tokenizer: of bge-m3 and multilingual E5."""
    scores, unknown = _scores(metadata, tokens), special_token(metadata, "unknown")
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    unknown = kinds.index(TokenType.UNKNOWN) if unknown is None and TokenType.UNKNOWN in kinds else unknown
    with foreign_code(lambda error: ModelLoadError(f"The GGUF file's tokenizer is inconsistent: {error}.")):
        tokenizer = Tokenizer(Unigram([*zip(tokens, scores, strict=True)], unknown, byte_fallback=False))
        if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
            tokenizer.normalizer = normalizers.Precompiled(bytes(charsmap))
    prefix = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = pre_tokenizers.Metaspace("▁", prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace("▁", prefix)
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> BPE:
    with foreign_code(lambda error: ModelLoadError(f"The GGUF file's tokenizer is inconsistent: {error}.")):
        return BPE(vocab=vocabulary, merges=merges, **options)


def _merges_of_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return merge rules equivalent to SentencePiece: the best score first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


_ADDED = frozenset(map(int, (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)))


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    added = [
        AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in _ADDED and token
    ]
    tokenizer.add_tokens(added)


def _add_beginning_and_end(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], bos_by_default: bool
) -> None:
    """Set the tokens that `add_special_tokens` puts around a text."""
    bos = special_token(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) else None
    is_unigram = metadata["tokenizer.ggml.model"] == "t5"
    eos = special_token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", is_unigram) else None
    around = {tokens[token_id]: token_id for token_id in (bos, eos) if token_id is not None}
    if around:
        first, last = ([] if each is None else [tokens[each]] for each in (bos, eos))
        between = last * 2 if is_unigram else last  # XLM-R begins a second text with an end, too
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *between, "$B", *last],
            special_tokens=list(around.items()),
        )
