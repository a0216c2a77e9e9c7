"""Cached K/V blocks that other daemons keep: in the same folder, or in those of a peer."""

from __future__ import annotations

from engine.runtime.stores.disk import DiskStore
from engine.runtime.stores.folder import Folder, SharedStore, Source
from engine.runtime.stores.peer import PeerFolder
from engine.runtime.stores.tier import Opening, Tier
from engine.settings.peer import Peer

_MAX_NAMES = 1 << 18  # blocks of others that are remembered: about 100 MB
_PEER_NAMES = 1 << 16  # of these, for a peer's


def open_tier(opening: Opening) -> Tier | None:
    """Open the other daemons' parts of this one's folder, and the folders of a peer, if there are."""
    sources: list[Source] = []
    num_names, peer = 0, opening.config.kv_offload_peer
    own = opening.opened["disk"].store if "disk" in opening.opened else None
    if isinstance(own, DiskStore):
        sources.append(Folder(own.folder, opening.fingerprint, opening.block_bytes, own.name))
        num_names += 4 * own.num_slots
    if peer is not None:
        sources.append(PeerFolder(Peer.parse(peer), opening.fingerprint, opening.config.kv_offload_key or ""))
        num_names += _PEER_NAMES
    if not sources:
        return None
    return Tier(SharedStore(sources, min(num_names, _MAX_NAMES)), opening.pool, is_shared=True)
