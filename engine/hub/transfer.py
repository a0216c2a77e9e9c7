"""Lists the files of a repository as the hub does, else as its cache does, and fetches them with huggingface_hub.

The library resumes a connection that is lost, follows the hub's storage and keeps the layout of the cache. It does not
compare digests: those of large files are compared here.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm

from engine.core.errors import ModelLoadError
from engine.core.types import Progress, ReportProgress
from engine.files.file_digests import sha256_of
from engine.files.formats import LOCAL
from engine.hub.faults import is_offline, request_errors, sentence
from engine.system.progress import human_bytes
from engine.system.regular_file import read_text
from engine.system.version import VERSION

if TYPE_CHECKING:
    from httpx2 import Response  # huggingface_hub's HTTP library

log = logging.getLogger("quire.hub")
_library_log = logging.getLogger("huggingface_hub")  # whose warnings become lines of Quire's log
_library_log.handlers.clear()
_library_log.propagate = True

ANSWER_S = 3.5  # how long the hub may take to list a repository, before it counts as away
STALLED_S = 10.0  # how long a header may take
_AS_QUIRE: dict[str, Any] = {"library_name": "quire", "library_version": VERSION}


class RemoteFile(NamedTuple):
    """One file of a repository."""

    size: int  # 0: the listing does not say
    sha256: str | None  # of a large file


class Listing(NamedTuple):
    """The files of a repository at one commit, in the hub's order."""

    commit: str
    files: Mapping[str, RemoteFile]
    is_cached: bool = False  # the hub was not asked, or did not answer; every file listed is in the cache


def list_files(repo: str, revision: str | None, store: Path) -> Listing:
    """Return the hub's listing of a repository, else the cache's. Raises ModelLoadError."""
    try:
        info = HfApi(**_AS_QUIRE).model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_S)
        files = {
            each.rfilename: RemoteFile(int(each.size or 0), each.lfs.sha256 if each.lfs else None)
            for each in info.siblings or ()
        }
        return Listing(str(info.sha), files)
    except HFValidationError:
        raise ModelLoadError(
            f"{repo!r:.200} is neither a local path nor a Hugging Face id such as Qwen/Qwen3-0.6B; name {LOCAL}, or an id."
        ) from None
    except request_errors() as error:
        cached = _list_cache(revision or constants.DEFAULT_REVISION, store)
        why = sentence(error, repo, store, revision)
        if cached is None:
            raise ModelLoadError(why) from None
        if not is_offline(error):
            log.warning("%s Its cached copy is served, of commit %.7s.", why, cached.commit)
        return cached


def _list_cache(revision: str, store: Path) -> Listing | None:
    """Return the files of a revision that are in the cache, or None."""
    try:
        commit = read_text(store / "refs" / revision, 1024).strip()
    except (OSError, ValueError):
        commit = revision
    folder = store / "snapshots" / commit
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if commit else []
    files = {path.relative_to(folder).as_posix(): RemoteFile(path.stat().st_size, None) for path in found}
    return Listing(commit, files, is_cached=True) if files else None


@contextmanager
def open_file(repo: str, commit: str, name: str, num_bytes: int) -> Iterator[Response]:
    """Yield the response with a file's first bytes. Raises the libraries' errors."""
    headers = build_hf_headers(**_AS_QUIRE) | {"Accept-Encoding": "identity", "Range": f"bytes=0-{num_bytes - 1}"}
    url = hf_hub_url(repo, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, timeout=STALLED_S) as response:
        hf_raise_for_status(response)
        yield response


def fetch_files(repo: str, listing: Listing, names: Sequence[str], store: Path, report: ReportProgress) -> None:
    """Fetch files into the cache, one after the other. Raises ModelLoadError, or the libraries' errors."""
    sizes = {name: listing.files[name].size for name in names}
    total = sum(sizes.values())
    _check_space(repo, total, store.parent)
    others = f" and {len(sizes) - 1} others" if len(sizes) > 1 else ""
    first = max(sizes, key=lambda name: sizes[name])
    report(Progress("download", f"{first}{others}, {human_bytes(total)}, from {constants.ENDPOINT} to {store.parent}"))
    received = 0

    class Bar(tqdm):
        """Reports the bytes of all files instead of drawing those of one."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]  # tqdm has no types

        def update(self, n: float | None = 1) -> None:
            nonlocal received
            received += int(n or 0)
            if received < total:
                report(Progress("download", "", received, total, "bytes"))

        def update_transfer(self, n: float | None = 1) -> None:
            """Ignore what Xet's storage sends for these bytes."""

    for name in names:
        path = hf_hub_download(repo, name, revision=listing.commit, cache_dir=store.parent, tqdm_class=Bar, **_AS_QUIRE)
        _check_digest(repo, name, listing.files[name].sha256, Path(path))
    report(Progress("download", "", total, total, "bytes"))


def _check_space(repo: str, num_bytes: int, cache: Path) -> None:
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if free < num_bytes:
        raise ModelLoadError(
            f"{repo!r} needs {human_bytes(num_bytes)} more in {cache}, where {human_bytes(free)} are free; free some "
            "space, or name another folder with --download-dir."
        )


def _check_digest(repo: str, name: str, listed: str | None, path: Path) -> None:
    """Delete a file whose content is not the one listed, and raise ModelLoadError."""
    if listed is None or (found := sha256_of(path)) == listed:
        return
    path.resolve().unlink()
    path.unlink(missing_ok=True)  # the link to it
    raise ModelLoadError(
        f"The hub sends a content of the digest {found} for {name} of {repo!r}, which it lists with {listed}; the file was "
        "deleted. Try again later, or name another --revision."
    )
