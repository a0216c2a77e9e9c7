"""A model of the hub: its files at one commit, fetched into the cache as far as they are needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from engine.core.errors import ModelLoadError
from engine.core.types import ReportProgress
from engine.files.quant_config import BESIDE
from engine.hub.faults import request_errors, sentence
from engine.hub.files import (
    CONFIG,
    INDEX,
    LORA_CONFIG,
    LORA_WEIGHTS,
    gguf_files,
    is_folder,
    mmproj_files,
    small_files,
    split_tag,
    weight_files,
)
from engine.hub.transfer import fetch_files, list_files, open_file
from engine.runtime.weights.safetensors import shard_names
from engine.system.regular_file import expanded, reason

log = logging.getLogger("quire.hub")

_HEAD_BYTES = 1 << 16  # of a GGUF file, whose architecture is among its first keys
_HEADER_BYTES = 1 << 25  # of its whole header, which is mostly the vocabulary: 5 to 15 MiB
_HEADER_S = 2.0  # how long a start waits for the header before it fetches the file


class Beginning(NamedTuple):
    """The first bytes of a file; `source` names it in errors."""

    source: str
    content: bytes


class HubModel:
    """A model of the hub: its repository at one commit, and the cache that keeps it."""

    def __init__(self, model: str, revision: str | None, cache_folder: Path) -> None:

        self.repo, self._tag = split_tag(model)
        self._store = cache_folder / f"models--{self.repo.replace('/', '--')}"
        self._listing = list_files(self.repo, revision, self._store)
        self._folder = self._store / "snapshots" / self._listing.commit
        self._revision = revision or constants.DEFAULT_REVISION

    @property
    def _subject(self) -> str:
        """Return the repository, or its copy, as the subject of a sentence."""
        return (
            f"The cached copy of {self.repo!r} in {self._store.parent}" if self._listing.is_cached else repr(self.repo)
        )

    @property
    def is_folder(self) -> bool:
        """Return whether the model is a folder of safetensors, not a GGUF file."""
        return is_folder(list(self._listing.files), self._tag)

    def fetch_config(self, *, weights: bool = True) -> Path:
        """Return the folder with config.json and the quantization settings beside it. Raises ModelLoadError.

        With `weights`, also for a repository that has none.
        """
        names = self._listing.files
        if weights and INDEX not in names and not self._listing.is_cached:
            weight_files(list(names), (), self._subject)
        if CONFIG not in names and not self._listing.is_cached:
            raise ModelLoadError(f"{self._subject} has no {CONFIG}; name a repository of a language model.")
        self._fetch([CONFIG, *(name for name in BESIDE if name in names)], None)
        return self._folder

    def beginnings(self) -> Generator[Beginning]:
        """Yield ever longer beginnings of the GGUF file, until its header must be there; none if it is in the cache.

        Raises ModelLoadError.
        """
        first, *_ = parts = gguf_files(list(self._listing.files), self._tag, self._subject)
        self._require(parts)
        if (self._folder / first).exists():
            return
        content, wanted, start_s = bytearray(), _HEAD_BYTES, time.monotonic()
        try:
            with open_file(self.repo, self._listing.commit, first, _HEADER_BYTES) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) >= wanted:
                        yield Beginning(f"{self.repo}/{first}", bytes(content))
                        wanted = 2 * len(content)
                    if len(content) >= _HEADER_BYTES or time.monotonic() - start_s > _HEADER_S:
                        break
        except request_errors() as error:
            raise ModelLoadError(sentence(error, self.repo, self._store)) from None
        yield Beginning(f"{self.repo}/{first}", bytes(content))

    def fetch(self, report: ReportProgress, *, weights: bool = True, images: bool = False) -> Path:
        """Return the local folder or .gguf file, fetching what is missing. Raises ModelLoadError.

        Without `weights`, a folder's configuration and tokenizer suffice. With `images`, the vision half beside a .gguf file
        is fetched, too.
        """
        names = list(self._listing.files)
        if self.is_folder:
            path, wanted = self._folder, small_files(names)
            wanted += self._weights(names) if weights else ()
        else:
            wanted = gguf_files(names, self._tag, self._subject)
            path = self._folder / wanted[0]
            wanted += mmproj_files(names, wanted[0]) if images else ()
        self._fetch(wanted, report)
        if not self._listing.is_cached:
            self._note_commit()
        return path

    def fetch_adapter(self, report: ReportProgress | None, *, weights: bool) -> Path:
        """Return the folder of an adapter with its config, and its weights if asked for. Raises ModelLoadError."""
        if LORA_WEIGHTS not in self._listing.files and "adapter_model.bin" in self._listing.files:
            raise ModelLoadError(
                f"{self._subject} holds only pickled weights (adapter_model.bin), which can run code when read; name an "
                f"adapter with {LORA_WEIGHTS}."
            )
        if not self._listing.is_cached:
            self._require([LORA_WEIGHTS])
        self._fetch([LORA_CONFIG, *([LORA_WEIGHTS] if weights else [])], report)
        if not self._listing.is_cached:
            self._note_commit()
        return self._folder

    def _weights(self, names: Sequence[str]) -> list[str]:
        """Return the weight files that the index names, or that lie there without one, and the index."""
        shards: list[str] = []
        if INDEX in names:
            self._fetch([INDEX], None)
            shards = shard_names(self._folder / INDEX)
        if self._listing.is_cached and not any(name.endswith(".safetensors") for name in names):
            self._require(["model.safetensors"])
        return [*([INDEX] if shards else []), *weight_files(names, shards, self._subject)]

    def _require(self, names: Sequence[str]) -> None:
        """Raise ModelLoadError for a file that the listing does not have."""
        absent = next((name for name in names if name not in self._listing.files), None)
        if absent is None:
            return
        remedy = "start once with the hub in reach" if self._listing.is_cached else "name another repository"
        raise ModelLoadError(f"{self._subject} lacks {absent}, without which it cannot be served; {remedy}.")

    def _fetch(self, names: Sequence[str], report: ReportProgress | None) -> None:
        """Fetch the files that are not in the cache. Raises ModelLoadError."""
        self._require(names)
        missing = [name for name in names if not (self._folder / name).exists()]
        if not missing:
            return
        try:
            fetch_files(self.repo, self._listing, missing, self._store, report or (lambda _: None))
        except request_errors() as error:
            raise ModelLoadError(sentence(error, self.repo, self._store)) from None

    def _note_commit(self) -> None:
        """Keep the commit of the revision, by which a start without the hub finds the files."""
        path = self._store / "refs" / self._revision
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._listing.commit)
        except OSError as error:  # a cache that can only be read
            log.debug("%s cannot be written: %s", path, reason(error))


@cache
def open_model(model: str, revision: str | None, download_dir: str | None) -> HubModel:
    """Return a model of the hub, listed once a process. Raises ModelLoadError."""

    return HubModel(model, revision, expanded(download_dir or constants.HF_HUB_CACHE).absolute())
