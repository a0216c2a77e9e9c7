"""Measures a hand-over of K/V between two processes, against a plain copy of as many bytes.

    python -m tools handover --mib 1024
    ip netns exec near python -m tools handover --through "ip netns exec far" --address 10.77.0.2

The two talk over loopback, or the other process runs elsewhere: `--through` is what starts it there, and `--address` is
where it listens.

The plain copy is one `sendall` of a buffer, received into a buffer. The hand-over is what daemons do: a key that both
prove, a parcel sent from shared memory, a checksum of each block verified. Rounds alternate; figures are medians, and the
ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np

from engine.runtime.stores.folder import KnownPart, Parcels
from engine.runtime.stores.listener import Listener
from engine.runtime.stores.wire import Deadline, PeerFolder
from engine.settings.peer import Peer
from loadtest.arguments import positive_int
from loadtest.output import print_table, save_json

_KEY = _FINGERPRINT = "feed"
_PIECE_BYTES = 16 << 20  # as engine/handover.py
_CHILD = "import sys; from tools.handover import serve; serve(sys.argv[1], *map(int, sys.argv[2:]))"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--mib", type=positive_int, default=512, help="K/V to hand over")
    parser.add_argument("--block-kib", type=positive_int, default=360, help="K/V of a block; SmolLM2-135M has 360 KiB")
    parser.add_argument("--rounds", type=positive_int, default=5, help="rounds")
    parser.add_argument("--through", default="", metavar="COMMAND", help="start the other process through this command")
    parser.add_argument("--address", default="127.0.0.1", help="address of the other process")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(args: argparse.Namespace) -> int:
    """Run the rounds and print the medians."""
    block_bytes = args.block_kib << 10
    num_blocks = max((args.mib << 20) // block_bytes, 1)
    num_bytes = num_blocks * block_bytes
    python = [*shlex.split(args.through), sys.executable, "-c", _CHILD]
    command = [*python, args.address, str(num_blocks), str(block_bytes), str(args.rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603 - this file
        assert child.stdout is not None
        plain_port, *names = child.stdout.readline().split()
        parcel_port = int(child.stdout.readline())
        rates: list[tuple[float, float]] = []
        for name in names:
            plain_s = _copy(Peer(args.address, int(plain_port)), num_bytes)
            handed_s = _hand_over(Peer(args.address, parcel_port), name, num_blocks, block_bytes)
            rates.append((num_bytes / plain_s / 1e9, num_bytes / handed_s / 1e9))
    rows = {
        "plain copy, GB/s": median(plain for plain, _ in rates),
        "hand-over, GB/s": median(handed for _, handed in rates),
        "ratio": median(handed / plain for plain, handed in rates),
    }
    print_table(
        (f"of two processes, over {args.address}", "median"), [(name, f"{value:.2f}") for name, value in rows.items()]
    )
    if args.json is not None:
        save_json(args.json, {"mib": num_bytes >> 20, "block_kib": args.block_kib, **rows})
    return 0


def serve(address: str, num_blocks: int, block_bytes: int, rounds: int) -> None:
    """The other process: offers as many parcels and plain copies as there are rounds, then ends."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        most = (rounds + 1) * num_blocks * (block_bytes + 4096)
        parcels, names = Parcels(Path(folder), _FINGERPRINT, block_bytes, most, 3600.0), []
        row = memoryview((np.arange(block_bytes) % 256).astype(np.uint8).data)
        for _ in range(rounds):
            parcel = parcels.pack(num_blocks)
            for slot in range(num_blocks):
                parcel.put(_name(slot), row, slot)
            parcel.close()
            names.append(parcel.name)
        content = np.zeros(num_blocks * block_bytes, np.uint8)
        content[:] = 7
        offered = Listener(parcels, Peer(address, 0), _KEY)
        with socket.create_server((address, 0)) as plain:
            print(plain.getsockname()[1], *names)
            print(offered.port, flush=True)
            for _ in names:
                connection, _ = plain.accept()
                with connection:
                    connection.sendall(content.data)
        while any(Path(folder).iterdir()):
            time.sleep(0.01)
        offered.close()


def _name(slot: int) -> bytes:
    """Return a name for a block."""
    return slot.to_bytes(32, "big")


def _copy(peer: Peer, num_bytes: int) -> float:
    """Return the seconds of a plain copy, into memory of its own as the hand-over has it."""
    begun = time.perf_counter()
    buffer = memoryview(np.empty(_PIECE_BYTES, np.uint8).data)
    with socket.create_connection(peer) as connection:
        left = num_bytes
        while left:
            length = connection.recv_into(buffer[: min(left, len(buffer))], 0, socket.MSG_WAITALL)
            assert length, "the other process ended"
            left -= length
    return time.perf_counter() - begun


def _hand_over(peer: Peer, name: str, num_blocks: int, block_bytes: int) -> float:
    begun = time.perf_counter()
    far = PeerFolder(peer, _FINGERPRINT, _KEY, Deadline(300.0))
    parcel = KnownPart(far, name)
    parcel.look()
    piece = max(_PIECE_BYTES // block_bytes, 1)
    rows = cycle([memoryview(row.data) for row in np.empty((piece, block_bytes), np.uint8)])
    num_good = sum(parcel.read([_name(slot) for slot in range(num_blocks)], rows))
    assert num_good == num_blocks, "it is damaged"
    far.remove(name)
    far.close()
    return time.perf_counter() - begun
