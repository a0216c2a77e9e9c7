"""Negotiates the hand-over of K/V from a prefill daemon to a decode daemon.

A router stands between the two. A request with `do_remote_decode` has the prefill daemon compute its prompt, keep the K/V
for a while, and answer where it is. A request with `do_remote_prefill` has the decode daemon (--kv-transfer-config) take it
from there, and continue as if its prefix cache had held the K/V before, so the answer is the same as without a hand-over.
If anything fails, the prompt is computed here: a stream may be late, it is never lost. Event loop; the engine copies
(engine/handover.py).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from math import inf
from typing import Any

from engine.core.errors import ParcelError, QuireError
from engine.core.kv.prefix_cache import chain_root, request_names
from engine.core.types import Request
from engine.handle import CountMissing, EngineHandle, HandoverConfig, OpenHandover, Prefix, ReceivePrefix, SendPrefix
from engine.settings.peer import Peer
from server.answers.body import KVTransferParams
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig

log = logging.getLogger("quire.handoff")

LEAST_PATIENCE_S = 1.0  # with a daemon that has much to do; computing short prompts here may be faster
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 64.0  # in which a daemon that failed is not asked; it doubles with each failure


class HandoffOutcome(str, Enum):
    """What became of a prompt; a label of the counter."""

    RECEIVED = "received"  # its K/V came from the prefill daemon
    SHORT = "short"  # all of it was cached here
    FAILED = "failed"  # it should have come, and had to be computed here all the same


def handover_config(config: AppConfig) -> HandoverConfig:
    """Return the settings of the transports."""
    first_key = config.api_keys[0] if config.api_keys else ""
    return HandoverConfig(
        folder=config.kv_connector_dir,
        max_bytes=int(config.kv_connector_gib * (1 << 30)),
        expiry_s=config.kv_connector_expiry_s,
        listen=None if config.kv_connector_listen is None else Peer.parse(config.kv_connector_listen),
        peers=frozenset(map(Peer.parse, config.kv_connector_peers)),
        key=config.kv_connector_key or first_key,
    )


class Pauses:
    """Whether to ask a daemon: after a failure not for a growing while, then by one request that probes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_failures = 0
        self._until_s = 0.0
        self._is_probing = False

    def begin(self) -> bool:
        """Return whether to ask now; the caller then calls `succeed`, `fail` or `leave` once."""
        if self._num_failures and (self._is_probing or self._clock() < self._until_s):
            return False
        self._is_probing = self._num_failures > 0
        return True

    def succeed(self) -> None:
        """Ask from now on."""
        self._num_failures, self._is_probing = 0, False

    def fail(self) -> None:
        """Pause, twice as long as the last time; requests that fail together count once."""
        if not self._num_failures or self._is_probing:
            pause_s = min(_FIRST_PAUSE_S * 2**self._num_failures, _MAX_PAUSE_S)
            self._num_failures += 1
            self._until_s = self._clock() + pause_s
        self._is_probing = False

    def leave(self) -> None:
        """Note that nothing was learnt: the client left, or the request itself was the reason."""
        self._is_probing = False


class Sender:
    """A prefill daemon's end."""

    def __init__(self, engine: EngineHandle, config: AppConfig) -> None:
        """Raises ConfigError."""
        self._engine = engine
        self.port = engine.control(OpenHandover(handover_config(config))).result()
        self._engine_id = uuid.uuid4().hex
        self._host: str | None = None
        if config.kv_connector_listen is not None:
            self._host = config.kv_connector_host or Peer.parse(config.kv_connector_listen).host
            log.info("K/V is offered to other machines at %s", Peer(self._host, self.port or 0))

    async def offer(self, request: Request) -> Mapping[str, Any] | None:
        """Return where a decode daemon finds the K/V of a computed prompt; None without a full block."""
        try:
            offer = await asyncio.wrap_future(self._engine.control(SendPrefix(prefix_of(self._engine, request))))
        except QuireError as error:
            log.warning("K/V is not offered: %s", error)
            return None
        if offer is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": list(range(offer.num_blocks)),
            "remote_request_id": offer.name,
            "remote_host": self._host,
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": offer.num_blocks * self._engine.config.block_size,
            "remote_blocks_expiry_time": offer.expires_s,
        }


class Receiver:
    """A decode daemon's end."""

    def __init__(self, engine: EngineHandle, config: AppConfig, count: Callable[[HandoffOutcome], None]) -> None:
        """Raises ConfigError."""
        self._engine, self._count, self._handover = engine, count, handover_config(config)
        engine.control(OpenHandover(self._handover)).result()
        self._timeout_s = config.kv_transfer_timeout_s
        self._is_well = True  # the last prompt that was asked for came
        self._pauses: dict[object, Pauses] = defaultdict(lambda: Pauses(engine.clock))  # by address, of the settings

    async def fetch(self, request: Request, transfer: KVTransferParams) -> None:
        """Fill the prefix cache with the beginning of a prompt, if possible. Raises ApiError for a foreign address."""
        peer = self._allowed(transfer)
        if request.params.prompt_logprobs is not None:
            return  # every position has to be computed here
        prefix, where = prefix_of(self._engine, request), peer or "shared memory"
        try:
            missing = await asyncio.wrap_future(self._engine.control(CountMissing(prefix)))
        except QuireError as error:
            self._note(HandoffOutcome.FAILED, where, f"{type(error).__name__}: {error}")
            return
        if not missing.num_blocks:
            self._count(HandoffOutcome.SHORT)
            return
        pauses = self._pauses[where]
        if not pauses.begin():
            self._count(HandoffOutcome.FAILED)
            return
        # No longer than computing the prompt takes: the client would be better off without the hand-over.
        limit_s = self._limit_s(request)
        patience_s = min(self._timeout_s, limit_s, max(missing.seconds, LEAST_PATIENCE_S))
        try:
            taking = self._engine.control(ReceivePrefix(transfer.remote_request_id, prefix, peer, patience_s))
            await asyncio.wait_for(asyncio.wrap_future(taking), patience_s)
            pauses.succeed()
        except Exception as error:  # any: the prompt is computed here
            # A request with a short deadline, or for what is not there, says nothing about the daemon.
            is_impatient = isinstance(error, (TimeoutError, asyncio.TimeoutError)) and patience_s == limit_s
            if not (is_impatient or isinstance(error, ParcelError)):
                pauses.fail()
            self._note(HandoffOutcome.FAILED, where, f"{type(error).__name__}: {error}")
        else:
            self._note(HandoffOutcome.RECEIVED, where)
        finally:
            pauses.leave()

    def _allowed(self, transfer: KVTransferParams) -> Peer | None:
        """Return the address to take K/V from, None for shared memory. Raises ApiError unless the settings name it."""
        if not transfer.remote_host and not transfer.remote_port:
            return None
        peer = Peer(transfer.remote_host, transfer.remote_port)
        if peer not in self._handover.peers:
            message = (
                f"kv_transfer_params names {peer}, which is not among peers of --kv-transfer-config; add it there."
            )
            raise ApiError(400, "peer_not_allowed", message, "kv_transfer_params.remote_host")
        return peer

    def _limit_s(self, request: Request) -> float:
        """Return how long a request itself lets K/V take; infinite without a deadline."""
        limits = [limit for limit in (request.deadline_s, request.max_queue_s) if limit is not None]
        return min([limit / 2 for limit in limits], default=inf)

    def _note(self, outcome: HandoffOutcome, where: object, why: str = "") -> None:
        """Count an outcome; log only when prefill daemons start or cease to hand over."""
        self._count(outcome)
        is_well = outcome is HandoffOutcome.RECEIVED
        if is_well and not self._is_well:
            log.info("K/V comes from %s again.", where)
        elif why and self._is_well:
            log.warning("Prompts are computed here, for %s did not hand one over (%s).", where, why)
        self._is_well = is_well or (self._is_well and not why)


def prefix_of(engine: EngineHandle, request: Request) -> Prefix:
    """Return what names the K/V of a request's prompt."""
    adapter = b"" if request.params.adapter is None else request.params.adapter.digest
    root = chain_root(request.cache_salt, adapter, request.cache_owner)
    return Prefix(request_names(request, engine.config), request.prompt, root)
