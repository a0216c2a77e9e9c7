"""Lists the files of a repository: as the hub does, else as the cache does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError  # before Python 3.11 another one
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from engine.core.errors import ModelLoadError
from engine.files.formats import LOCAL
from engine.hub.faults import is_offline, request_errors, sentence
from engine.system.calls import on_thread
from engine.system.regular_file import read_text
from engine.system.version import VERSION

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

log = logging.getLogger("quire.hub")

T = TypeVar("T")

ANSWER_S = 3.5  # how long the hub may take to list a repository, before it counts as away
GRACE_S = 0.5  # beyond that, for a search for its address that does not end


class RemoteFile(NamedTuple):
    """One file of a repository. The digest names it in the cache, as its ETag does."""

    size: int | None  # None: the listing does not say
    digest: str | None


class Listing(NamedTuple):
    """The files of a repository at one commit, in the hub's order."""

    commit: str
    files: Mapping[str, RemoteFile]
    is_cached: bool = False  # the hub was not asked, or did not answer; every file listed is in the cache


def list_files(repo: str, revision: str | None, store: Path) -> Listing:
    """Return the hub's listing of a repository, else the cache's. Raises ModelLoadError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        api = HfApi(library_name="quire", library_version=VERSION)
        info = _in_time(lambda: api.model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_S))
        return _read_listing(info)
    except HFValidationError:
        raise ModelLoadError(
            f"{repo!r:.200} is neither a local path nor a Hugging Face id such as Qwen/Qwen3-0.6B; name {LOCAL}, or an id."
        ) from None
    except request_errors() as error:
        cached = _list_cache(revision, store)
        why = sentence(error, repo, store, revision)
        if cached is None:
            raise ModelLoadError(why) from None
        if not is_offline(error):
            log.warning("%s Its cached copy is served, of commit %.7s.", why, cached.commit)
        return cached


def _in_time(call: Callable[[], T]) -> T:
    """Return the call's result. Raises TimeoutError; the system's search for an address has no limit."""
    try:
        return on_thread("hub-listing", call).result(ANSWER_S + GRACE_S)
    except FutureTimeoutError:
        raise TimeoutError("no answer") from None


def _read_listing(info: ModelInfo) -> Listing:
    """Return the files that a hub lists. Raises ValueError for a listing that names no commit or unsafe paths."""
    files = {}
    for sibling in info.siblings or ():
        name = sibling.rfilename
        if name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or "\0" in name:
            raise ValueError(f"it lists the file {name!r:.80}")
        size = (sibling.lfs and sibling.lfs.size) or sibling.size
        if size is not None and not (type(size) is int and size >= 0):
            raise ValueError(f"it lists {name!r:.80} with a size of {size!r:.80}")
        digest = (sibling.lfs and sibling.lfs.sha256) or sibling.blob_id
        files[name] = RemoteFile(size, digest and safe_name(digest))
    return Listing(safe_name(info.sha or ""), files)


def safe_name(name: str) -> str:
    """Return a commit or digest, which becomes a file's name in the cache. Raises ValueError."""
    if not re.fullmatch(r"[0-9A-Za-z_-]+", name):
        raise ValueError(f"it names {name!r:.80} as a digest")
    return name


def _list_cache(revision: str | None, store: Path) -> Listing | None:
    """Return the files of a revision that are in the cache, or None."""
    from huggingface_hub.constants import DEFAULT_REVISION

    revision = revision or DEFAULT_REVISION
    try:
        commit = read_text(store / "refs" / revision, 1024).strip()
    except (OSError, ValueError):
        commit = revision
    folder = store / "snapshots" / commit
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if commit else []
    if not found:
        return None
    files = {path.relative_to(folder).as_posix(): RemoteFile(path.stat().st_size, None) for path in found}
    return Listing(commit, files, is_cached=True)
