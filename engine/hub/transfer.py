"""Lists the files of a repository as the hub does, else as its cache does, and fetches them into the cache.

A transfer resumes what a lost connection or an earlier start left.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # before Python 3.11 another one
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from huggingface_hub import HfApi, ModelInfo, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session, hf_raise_for_status

from engine.core.errors import ModelLoadError
from engine.core.types import Progress, ReportProgress
from engine.files.formats import LOCAL
from engine.hub.faults import is_offline, is_transient, request_errors, sentence, why
from engine.system.calls import on_thread
from engine.system.progress import human_bytes
from engine.system.regular_file import read_text
from engine.system.version import VERSION

if TYPE_CHECKING:
    from httpx2 import Response  # huggingface_hub's HTTP library
    from typing_extensions import Self

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

    revision = revision or constants.DEFAULT_REVISION
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


STALLED_S = 10.0  # how long a transfer may stand still, before it is resumed
RETRY_S = 1.0
MAX_RETRIES = 5  # of a file, without a byte received in between
_NUM_THREADS = 4
_POLL_S = 0.1
_PIECE_BYTES = 1 << 20


@contextmanager
def open_file(repo: str, commit: str, name: str, start: int, end: int | None = None) -> Iterator[Response]:
    """Yield the response with a file's bytes from `start` on. Raises the libraries' errors."""

    headers = build_hf_headers(library_name="quire", library_version=VERSION)
    headers["Accept-Encoding"] = "identity"  # sizes and ranges are those of the file
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end}"
    url = hf_hub_url(repo, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, timeout=STALLED_S) as response:
        hf_raise_for_status(response)
        yield response


class _StoppedError(Exception):
    """Another file failed, or the user stopped the start."""


class Transfer:
    """Fetches files on threads, each into `blobs/DIGEST.incomplete`, which a later start resumes."""

    def __init__(self, repo: str, commit: str, store: Path, files: Mapping[str, RemoteFile]) -> None:
        self._repo = repo
        self._commit = commit
        self._store = store
        self._files = {name: self._described(name, file) for name, file in files.items()}
        self._have = {name: self._size_here(file) for name, file in self._files.items()}
        self._todo = deque(self._files)
        self._stop = threading.Event()

    def run(self, report: ReportProgress | None) -> None:
        """Fetch all files; report the bytes of all of them. Raises the libraries' errors."""
        total = sum(size for size, _ in self._files.values())
        self._check_space(total - sum(self._have.values()))
        if report:
            report(Progress("download", self._describe(total)))
        workers = {on_thread("hub", self._work) for _ in range(_NUM_THREADS)}
        try:
            while workers:
                ended, workers = wait(workers, _POLL_S, FIRST_COMPLETED)
                for worker in ended:
                    worker.result()
                done = sum(self._have.values())
                if report and done < total:
                    report(Progress("download", "", done, total, "bytes"))
        finally:
            self._stop.set()
        if report:
            report(Progress("download", "", total, total, "bytes"))

    def _described(self, name: str, file: RemoteFile) -> tuple[int, str]:
        """Return a file's size and digest, asking for them if the listing had none."""
        if file.size is not None and file.digest is not None:
            return file.size, file.digest

        found = get_hf_file_metadata(hf_hub_url(self._repo, name, revision=self._commit), timeout=ANSWER_S)
        if found.size is None or found.etag is None:
            raise ValueError(f"it gives neither size nor ETag of {name}")
        return found.size, safe_name(found.etag)

    def _size_here(self, file: tuple[int, str]) -> int:
        """Return how many bytes of a file are in the cache."""
        size, digest = file
        blob = self._store / "blobs" / digest
        for path in (blob, _partial(blob)):
            if path.exists():
                return min(path.stat().st_size, size)
        return 0

    def _check_space(self, num_bytes: int) -> None:
        folder = next(path for path in (self._store, *self._store.parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if free < num_bytes:
            raise ModelLoadError(
                f"{self._repo!r} needs {human_bytes(num_bytes)} more in {self._store.parent}, where {human_bytes(free)} are "
                "free; free some space, or name another folder with --download-dir."
            )

    def _describe(self, total: int) -> str:

        first = max(self._files, key=lambda name: self._files[name][0])
        others = f" and {len(self._files) - 1} others" if len(self._files) > 1 else ""
        here = sum(self._have.values())
        resumed = f", {human_bytes(here)} of them here already" if here else ""
        return f"{first}{others}, {human_bytes(total)}{resumed}, from {constants.ENDPOINT} to {self._store.parent}"

    def _work(self) -> None:
        """Fetch files until none is left, or one fails."""
        while not self._stop.is_set():
            try:
                name = self._todo.popleft()
            except IndexError:
                return
            with suppress(_StoppedError):
                self._fetch(name)

    def _fetch(self, name: str) -> None:
        """Fetch one file into the cache, unless another process has, and link it into the snapshot."""

        size, digest = self._files[name]
        blob = self._store / "blobs" / digest
        lock = self._store.parent / ".locks" / self._store.name / f"{digest}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if not blob.exists():
                with _Incoming(_partial(blob), size, digest) as file:
                    self._receive(name, file)
                    self._check(name, file)
                _partial(blob).replace(blob)
        self._have[name] = size
        link = self._store / "snapshots" / self._commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(os.path.relpath(blob, link.parent))
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            blob.replace(link)

    def _receive(self, name: str, file: _Incoming) -> None:
        """Append the rest of a file, resuming whenever the connection is lost."""
        num_retries = 0
        while file.num_bytes < file.size:
            start = file.num_bytes
            lost = self._attempt(name, file)
            if lost is None:
                return
            num_retries = 0 if file.num_bytes > start else num_retries + 1
            if num_retries > MAX_RETRIES:
                raise lost
            at = human_bytes(file.num_bytes)
            log.warning("the transfer of %s was interrupted at %s (%s); resuming it", name, at, why(lost))
            if num_retries and self._stop.wait(RETRY_S):
                raise _StoppedError

    def _attempt(self, name: str, file: _Incoming) -> Exception | None:
        """Append the rest of a file; return the error after which it can be resumed, if there was one."""
        try:
            self._append(name, file)
        except request_errors() as error:
            if not is_transient(error):
                raise
            return error
        return None

    def _append(self, name: str, file: _Incoming) -> None:
        """Append to a file until the connection ends. Raises for a file that is not as long as listed."""
        start = file.num_bytes
        with open_file(self._repo, self._commit, name, start) as response:
            if start and response.status_code != 206:  # the server does not resume
                file.clear()
            found = _total(response)
            if found is not None and found != file.size:
                raise self._wrong(name, file, f"{found} bytes")
            for piece in response.iter_bytes():
                if self._stop.is_set():
                    raise _StoppedError
                if file.num_bytes + len(piece) > file.size:
                    raise self._wrong(name, file, f"more than {file.size} bytes")
                file.write(piece)
                self._have[name] = file.num_bytes
        if file.num_bytes != file.size:
            raise self._wrong(name, file, f"{file.num_bytes} bytes")

    def _check(self, name: str, file: _Incoming) -> None:
        """Raise ModelLoadError for a file whose content is not the one listed."""
        if file.digest is not None and (found := file.digest.hexdigest()) != file.listed:
            raise self._wrong(name, file, f"a content of the digest {found}")

    def _wrong(self, name: str, file: _Incoming, sent: str) -> ModelLoadError:
        """Delete what was received of a file; return the refusal."""
        file.clear()
        listed = f"{file.size} bytes" if "bytes" in sent else file.listed
        return ModelLoadError(
            f"The hub sends {sent} for {name} of {self._repo!r}, which it lists with {listed}; the file was deleted. Try "
            "again later, or name another --revision."
        )


class _Incoming:
    """A file while it is received, and the digest of the part that is there."""

    def __init__(self, path: Path, size: int, listed: str) -> None:
        """`listed` is the digest that names the file."""
        self.size, self.listed = size, listed
        self.digest = _new_digest(listed, size)
        self.num_bytes = 0
        self._file = path.open("a+b")
        here = os.fstat(self._file.fileno()).st_size
        if here > size:  # of another program's transfer
            self.clear()
            return
        self._file.seek(0)
        while left := here - self.num_bytes:
            self._count(self._file.read(min(left, _PIECE_BYTES)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, piece: bytes) -> None:
        """Append bytes."""
        self._file.write(piece)
        self._count(piece)

    def clear(self) -> None:
        """Discard the content."""
        self._file.seek(0)
        self._file.truncate()
        self.num_bytes, self.digest = 0, _new_digest(self.listed, self.size)

    def _count(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if self.digest is not None:
            self.digest.update(piece)


def _new_digest(listed: str, size: int) -> hashlib._Hash | None:
    """Return what computes the digest that a hub lists: SHA-256 of large files, git's of others; None for another name."""
    if re.fullmatch(r"[0-9a-f]{64}", listed):
        return hashlib.sha256()
    if re.fullmatch(r"[0-9a-f]{40}", listed):
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return None


def _total(response: Response) -> int | None:
    """Return the size of the whole file, as the response states it."""
    stated = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
    return int(stated) if stated.isdecimal() else None


def _partial(blob: Path) -> Path:
    """Return the file that a blob is received into."""
    return blob.with_name(f"{blob.name}.incomplete")
