"""How tokenizers of GGUF files split a text into words, by `tokenizer.ggml.pre`.

A name stands for all tokenizers that give the same ids for one test text, whichever model they belong to. The patterns
are those of the models' tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

DEFAULT = "default"  # the name of files that name none
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}%s]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}%s]"
_NOT_HAN = r"&&[^\p{Han}]"


def _cased(end: str, without: str = "") -> str:
    """Return words of capitals before small letters, then `end`; `without` leaves letters out."""
    upper, lower = _UPPER % without, _LOWER % without
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}"


_TEKKEN = _cased("") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = _cased(f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_KIMI = r"\p{Han}+|" + _cased(f"{_CONTRACTIONS}?", _NOT_HAN) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
# For files that name none, llama.cpp splits with these.
_DEFAULT = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
# Letters of the alphabets that have capitals, as DeepSeek lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)


class Words(NamedTuple):
    """How a family of tokenizers prepares a text, and two habits of its merging."""

    split: Callable[[], PreTokenizer]
    is_composed: bool = False  # characters are composed first (NFC)
    is_whole_first: bool = False  # a word that is a token is that token, whatever the merges
    has_bos: bool = False  # a text begins with a token for that, if the file does not say


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


def _passes(*patterns: str, digits: bool = False) -> PreTokenizer:
    """Return splits one after the other; each keeps what it finds and what lies between."""
    splits: Sequence[PreTokenizer] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    alone = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, *alone, last])


_FAMILIES: Sequence[tuple[str, Words]] = (
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Words(partial(_passes, _LLAMA3 % 3), is_whole_first=True, has_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Words(partial(_passes, _LLAMA3 % 3))),
    ("glm4 glm5", Words(partial(_passes, _LLAMA3 % 3), is_whole_first=True)),
    ("qwen2 deepseek-r1-qwen", Words(partial(_passes, _LLAMA3 % 1), is_composed=True)),
    ("kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Words(partial(_passes, _LLAMA3 % 1))),
    ("qwen35", Words(partial(_passes, _QWEN35), is_composed=True)),
    ("tekken", Words(partial(_passes, _TEKKEN), is_whole_first=True, has_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Words(partial(_passes, _GPT4O))),
    ("kimi-k2", Words(partial(_passes, _KIMI))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Words(partial(_passes, *_DEEPSEEK3))),
    ("deepseek-llm", Words(partial(_passes, *_DEEPSEEK_LLM, digits=True))),
    ("deepseek-coder", Words(partial(_passes, *_DEEPSEEK_CODER))),
    ("gpt-2 phi-2 jais trillion granite-docling gigachat mellum exaone4 modern-bert a.x-4.0", Words(_gpt2)),
    ("olmo mpt", Words(_gpt2, is_composed=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Words(_digits_then_gpt2)),
    ("command-r", Words(_digits_then_gpt2, is_composed=True)),
    ("falcon", Words(_falcon)),
    (DEFAULT, Words(partial(_passes, *_DEFAULT))),
)


def _by_name() -> Iterator[tuple[str, Words]]:
    for names, words in _FAMILIES:
        for name in names.split():
            yield name, words


WORDS: Mapping[str, Words] = dict(_by_name())
