"""Turns the errors of a hub, a network and a disk into sentences for the person who starts Quire.

huggingface_hub and its HTTP library have no common base class of errors; `request_errors` names them.
"""

from __future__ import annotations

import errno
import re
from importlib import import_module
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.files.formats import LOCAL
from engine.system.regular_file import reason

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def request_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that a request may raise, those of an answer that is no hub's among them."""
    library = import_module(HTTPError.__module__.partition(".")[0])  # which HTTP library depends on the version
    foreign = HfHubHTTPError, HTTPError, library.InvalidURL, library.StreamError
    return (*foreign, OSError, ValueError, KeyError, TypeError, AttributeError)


def is_offline(error: Exception) -> bool:
    """Return whether HF_HUB_OFFLINE forbade a request."""
    return isinstance(error, OfflineModeIsEnabled)


def _why(error: Exception) -> str:
    """Return the error in a few words."""
    if status := _status(error):
        return f"HTTP {status}"
    text = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split())) or type(error).__name__
    return f"{text:.160}".rstrip(".")


def sentence(error: Exception, repo: str, store: Path, revision: str | None = None) -> str:
    """Return what went wrong with a repository, and what to do."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the file is not in the cache, because
    cache = store.parent
    if is_offline(error):
        return f"HF_HUB_OFFLINE is set, and {repo!r} is not in the cache, {cache}; unset it, or name {LOCAL}."
    if status := _status(error):
        return _refusal(error, status, repo, revision)
    if isinstance(error, (HTTPError, TimeoutError)):
        return (
            f"The hub at {constants.ENDPOINT} cannot be reached ({_why(error)}), so {repo!r} cannot be fetched; check the network and "
            f"HF_ENDPOINT, or name {LOCAL}."
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"{cache} is full; free some space, or name another folder with --download-dir. The files of {repo!r} that are "
            "complete are kept."
        )
    if isinstance(error, OSError) and error.errno:
        return f"{cache} cannot be written: {reason(error)}; name another folder with --download-dir."
    return f"{constants.ENDPOINT} does not answer as a model hub does ({_why(error)}); check HF_ENDPOINT."


def _refusal(error: Exception, status: int, repo: str, revision: str | None) -> str:
    """Return the sentence for an answer of the hub that is an error."""
    if isinstance(error, GatedRepoError):
        return f"{repo!r} is gated: accept its terms at {constants.ENDPOINT}/{repo}, and set HF_TOKEN to a token of that account."
    if isinstance(error, RevisionNotFoundError):
        return f"--revision is {revision!r}, which {repo!r} does not have; leave it out for the main branch."
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        token = "the token in use may not read it" if get_token() else "private, which needs a token in HF_TOKEN"
        spelling = "check the spelling" if "/" in repo else "ids have two parts, as Qwen/Qwen3-0.6B has"
        return f"{repo!r} is not on {constants.ENDPOINT}, or {token}; {spelling}, or name {LOCAL}."
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses {repo!r} (HTTP {status}); set HF_TOKEN to a token that may read it."
    if status == 429:
        return f"{constants.ENDPOINT} has had too many requests from here (HTTP 429); try again later, or set HF_TOKEN."
    return (
        f"{constants.ENDPOINT} answers HTTP {status}, so {repo!r} cannot be fetched; try again later, or name {LOCAL}."
    )


def _status(error: Exception) -> int:
    """Return the HTTP status of an error; 0 if there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0
