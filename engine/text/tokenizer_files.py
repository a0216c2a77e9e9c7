"""Loads the tokenizer of a model folder or of a GGUF file.

What transformers makes of a folder's files is kept, because its import takes longer than the rest of a start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers

from engine.core.errors import ConfigError, ModelLoadError
from engine.files.gguf_header import read_header
from engine.settings.speculative_config import SpeculativeConfig
from engine.sources.model_source import check_entries
from engine.system.cache_folder import cache_folder, keep, kept
from engine.system.calls import TRANSFORMERS, foreign_code
from engine.system.regular_file import expanded, read_bytes
from engine.text.generation_config import FILE, read_json_beside
from engine.text.gguf_tokenizer import TokenType, build_tokenizer, special_token
from engine.text.tokenizer import PROBE, TextTokenizer, TokenizerConfig
from engine.text.types import SamplingDefaults

log = logging.getLogger("quire.engine")

# The endings of files that decide on a tokenizer.
_READ = frozenset((".bpe", ".jinja", ".json", ".model", ".tiktoken", ".txt"))
_MAX_KEPT = 16  # tokenizers, of 1 to 40 MB
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


def load_tokenizer(
    source: str, *, chat_template: str | None = None, sampling: SamplingDefaults | None = None
) -> TextTokenizer:
    """Return the tokenizer of a local file or folder. Raises ModelLoadError.

    `chat_template` replaces the source's. `sampling` holds where a request names no value; the default is OpenAI's.
    """
    path = expanded(source)
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
    path = cache_folder() / f"tokenizer-{_digest(folder)}.json"
    with suppress(OSError, ValueError, TypeError), foreign_code(lambda _: ValueError(), (OSError,)):
        settings, _, backend = kept(path).decode().partition("\n")
        found = json.loads(settings)
        ends = frozenset(found.pop("eos_token_ids"))
        return tokenizers.Tokenizer.from_str(backend), TokenizerConfig(eos_token_ids=ends, **found)
    made = _by_transformers(folder)
    _keep(path, *made)
    return made


def _digest(folder: Path) -> str:
    """Return a name for what decides on a folder's tokenizer: its files, and the code of those who read them."""
    origin = getattr(find_spec("transformers"), "origin", None)  # a file with the version
    readers = [Path(each) for each in (__file__, origin) if each]
    digest = blake2b(tokenizers.__version__.encode(), digest_size=16)
    for path in [*readers, *sorted(path for path in folder.glob("*") if path.suffix in _READ)]:
        content = b""
        with suppress(OSError):  # such as a link to nothing
            content = read_bytes(path)
        digest.update(f"\0{path.name} {len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def _keep(path: Path, backend: tokenizers.Tokenizer, vocabulary: TokenizerConfig) -> None:
    """Keep a tokenizer for the next start, if all of it can be written; those kept longest ago go."""
    if backend.encode_special_tokens:  # which no file says
        return
    log.info("tokenizer: read by transformers, and kept for the next start")
    settings = {name: getattr(vocabulary, name) for name in ("special_tokens", "chat_template")}
    settings["eos_token_ids"] = sorted(vocabulary.eos_token_ids)
    with suppress(OSError, ValueError), foreign_code(lambda _: ValueError(), (OSError,)):  # parts in Python cannot be
        keep(path, json.dumps(settings) + "\n" + backend.to_str())
        others = sorted(path.parent.glob("tokenizer-*.json"), key=lambda each: each.stat().st_mtime)
        for each in others[:-_MAX_KEPT]:
            each.unlink(missing_ok=True)


def _by_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    def refuse(error: Exception) -> Exception:
        reason = " ".join(str(error).split()).rstrip(".")
        if not any(folder.glob("*token*")):
            reason = "the folder has no tokenizer.json"  # for which the library's message is very long
        return ModelLoadError(
            f"The tokenizer of {str(folder)!r} cannot be loaded: {reason}; name another with --tokenizer."
        )

    with TRANSFORMERS, foreign_code(refuse):
        from transformers import AutoTokenizer  # seconds to import; a GGUF file does without

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
