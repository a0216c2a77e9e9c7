"""Follows one daemon's KV events: the blocks that are cached, by medium."""

import sys

import msgspec
import zmq

cached: dict[str, set[int]] = {}
with zmq.Context() as context, context.socket(zmq.SUB) as socket:
    socket.connect(sys.argv[1])
    socket.subscribe(b"")
    while True:
        topic, number, payload = socket.recv_multipart()
        time_s, events, rank = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                cached.clear()
            elif event["type"] == "BlockStored":
                cached.setdefault(event["medium"], set()).update(event["block_hashes"])
            else:
                cached[event["medium"]].difference_update(event["block_hashes"])
        print(int.from_bytes(number, "big"), {medium: len(blocks) for medium, blocks in cached.items()}, flush=True)
