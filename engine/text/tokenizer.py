"""The tokenizer of a model folder or of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from engine.core.errors import ConfigError, InvalidRequestError, ModelLoadError
from engine.files.gguf_header import read_header
from engine.settings.speculative_config import SpeculativeConfig
from engine.sources.model_source import check_entries
from engine.system.calls import foreign_code
from engine.text.chat_template import ChatTemplate
from engine.text.generation_config import FILE, read_json_beside
from engine.text.gguf_tokenizer import TokenType, build_tokenizer, special_token
from engine.text.grammars.spec import VocabularySource
from engine.text.types import SamplingDefaults

# Tokens with which models end a turn. A GGUF file names one or two of them; a model may sample any.
_END_OF_TURN = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "</s>",
    )
)
# Further ones of vocabularies that have the first token.
_END_OF_TURN_BESIDE = {
    "<|channel|>": frozenset(("<|return|>", "<|call|>")),  # gpt-oss
    "<|observation|>": frozenset(("<|user|>", "<|observation|>")),  # GLM
}

# Text in several scripts, which another model's tokenizer encodes to other ids.
PROBE = (
    "The quick brown fox jumps over 1,234,567 lazy dogs; it's \u00fcber-schnell, \u00e9l\u00e9gant and 42% cheaper.\n"
    "def f(x):\n    return {'a': [x ** 2, None]}  # \u0434\u0430, \u4f60\u597d, \U0001f98a\n"
)


def _byte_of_letter() -> dict[str, int]:
    """Return byte-level BPE's letters: printable bytes, and U+0100 on for others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
_LONG_DECODE = 1024  # tokens, about 0.3 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer configuration that the `tokenizers` library does not hold."""

    special_tokens: Mapping[str, str]  # "bos_token" and the like, as chat templates call them
    eos_token_ids: frozenset[int]
    chat_template: str | None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sizes: tuple[int, int] | None = None  # number of ids, characters of the longest token; None: not known


class TextTokenizer:
    """A model's tokenizer, its special tokens and its chat template. Any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self._byte_level = "ByteLevel" in str(backend.decoder)
        self.chat_template = (
            ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens) if vocabulary.chat_template else None
        )
        self.vocab_size, self.max_token_chars = vocabulary.sizes or _sizes(backend)
        self._num_ids: int | None = None  # of the model, where the tokenizer has more
        self.eos_token_ids = vocabulary.eos_token_ids
        self.description = {**vocabulary.special_tokens, "chat_template": vocabulary.chat_template}
        self.sampling_defaults = vocabulary.sampling_defaults

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequestError for bad Unicode."""
        try:
            # Unlike `encode` this releases the GIL; otherwise a long text would stop the engine on any thread.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # the library's error for half of a surrogate pair, which JSON can spell
            raise InvalidRequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        if self._num_ids is not None and (beyond := max(ids, default=0)) >= self._num_ids:
            raise InvalidRequestError(
                f"The text holds {self._backend.id_to_token(beyond)!r:.80}, the tokenizer's id {beyond}, and the model has "
                f"{self._num_ids} tokens."
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some ids, with U+FFFD for broken UTF-8."""
        if len(token_ids) > _LONG_DECODE:  # unlike `decode` this releases the GIL
            return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def hold_to(self, vocab_size: int) -> None:
        """Refuse from now on text with ids beyond the model's vocabulary.

        Raises ConfigError if ordinary text has such ids, because the tokenizer is another model's.
        """
        self.eos_token_ids = frozenset(token_id for token_id in self.eos_token_ids if 0 <= token_id < vocab_size)
        if self.vocab_size <= vocab_size:
            return
        self._num_ids = vocab_size
        try:
            self.encode(PROBE, add_special_tokens=True)
        except InvalidRequestError as error:
            raise ConfigError(f"{error} Name the model's own tokenizer with --tokenizer.") from error

    def close(self) -> None:
        """End the process of the chat template. Idempotent."""
        if self.chat_template is not None:
            self.chat_template.close()

    def vocabulary(self, vocab_size: int) -> VocabularySource:
        """Return what grammars need to know of the tokens; the model may have more. Takes 30 ms for 49,152 tokens."""
        size = max(vocab_size, self.vocab_size)
        return VocabularySource(self._backend.to_str(), size, self.eos_token_ids, tuple(self.special_tokens))

    def for_transformers(self) -> Any:
        """Return a copy as a tokenizer of transformers, whose `apply_chat_template` returns a text or a list of ids."""
        from transformers import PreTrainedTokenizerFast  # seconds to import

        made = PreTrainedTokenizerFast(
            tokenizer_object=self._backend, clean_up_tokenization_spaces=False, **self.description
        )
        made.apply_chat_template = partial(made.apply_chat_template, return_dict=False)  # as before its version 5
        return made

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def load_tokenizer(
    source: str, *, chat_template: str | None = None, sampling: SamplingDefaults | None = None
) -> TextTokenizer:
    """Return the tokenizer of a local file or folder. Raises ModelLoadError.

    `chat_template` replaces the source's. `sampling` holds where a request names no value; the default is OpenAI's.
    """
    path = Path(source)
    backend, vocabulary = _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)
    template = chat_template or vocabulary.chat_template
    defaults = SamplingDefaults() if sampling is None else sampling
    return TextTokenizer(backend, replace(vocabulary, chat_template=template, sampling_defaults=defaults))


def check_draft_tokenizer(tokenizer: TextTokenizer, speculative_config: str | Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a draft model whose tokenizer encodes differently."""
    asked = None if speculative_config is None else SpeculativeConfig.read(speculative_config)
    if asked is None or asked.model is None or asked.method == "eagle3":
        return  # an EAGLE-3 draft has the model's tokens
    try:
        other = load_tokenizer(asked.model)
    except ModelLoadError:
        return  # a folder of weights alone; the engine compares the vocabulary sizes
    if other.encode(PROBE, add_special_tokens=False) != tokenizer.encode(PROBE, add_special_tokens=False):
        raise ConfigError(
            f"--speculative-config: the draft model {asked.model} has another tokenizer than the model; choose one of the "
            "same family."
        )


def _from_gguf(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    metadata = read_header(path).metadata
    backend = build_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", ())
    named_ends = {special_token(metadata, role) for role in ("eos", "eot", "eom")}
    mark = int(TokenType.CONTROL)  # comparing with members takes four times as long
    control = {tokens[i]: i for i, kind in enumerate(types) if kind == mark}
    short = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {name: special_token(metadata, role) for role, name in short.items()}
    return backend, TokenizerConfig(
        special_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        eos_token_ids=_turn_ends(control, {token_id for token_id in named_ends if token_id is not None}),
        chat_template=metadata.get("tokenizer.chat_template"),
        sizes=(len(tokens), max(map(len, tokens))),
    )


def _sizes(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """Return the number of ids and the length of the longest token; slow."""
    ids = backend.get_vocab(with_added_tokens=True)
    return max(ids.values()) + 1, max(map(len, ids))


def _turn_ends(control: Mapping[str, int], named: set[int]) -> frozenset[int]:
    """Return the tokens that end a turn: known control tokens, and those that a file names."""
    known = set(_END_OF_TURN)
    for mark, further in _END_OF_TURN_BESIDE.items():
        known |= further if mark in control else set()
    ends = named | {control[token] for token in known & control.keys()}
    if "<|channel|>" in control:  # there <|end|> ends a message, behind which the turn goes on
        ends.discard(control.get("<|end|>", -1))
    return frozenset(ends)


def _from_folder(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    check_entries(folder)
    from transformers import AutoTokenizer  # seconds to import; a GGUF file does without

    def refuse(error: Exception) -> Exception:
        reason = " ".join(str(error).split()).rstrip(".")
        if not any(folder.glob("*token*")):
            reason = "the folder has no tokenizer.json"  # for which the library's message is very long
        return ModelLoadError(
            f"The tokenizer of {str(folder)!r} cannot be loaded: {reason}; name another with --tokenizer."
        )

    with foreign_code(refuse):
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"The tokenizer of {str(folder)!r} has no fast version; name another with --tokenizer.")
    generation = read_json_beside(folder / FILE)
    ends: set[int] = set() if loaded.eos_token_id is None else {loaded.eos_token_id}
    for config in (generation, read_json_beside(folder / "config.json")):
        named = config.get("eos_token_id")
        ends.update(token_id for token_id in (named if isinstance(named, list) else [named]) if type(token_id) is int)
    template = loaded.chat_template
    special = {role: token for role, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    return backend, TokenizerConfig(
        special_tokens=special,
        eos_token_ids=frozenset(ends),
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )
