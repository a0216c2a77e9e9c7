"""What tests of engine/system/child_process.py run in a child: it does as the question says."""

from __future__ import annotations

import json
import os
import signal
import time

from engine.system.child_process import Parts, serve


def answer(parts: Parts) -> list[bytes]:
    what = bytes(parts[0]).decode()
    if what == "hang":
        time.sleep(3600)
    if what == "profile":
        signal.setitimer(signal.ITIMER_PROF, 0.01)
        while True:
            pass
    if what == "exit":
        os._exit(3)
    if what == "eat":
        return [bytes(1 << 30)]
    if what == "environment":
        return [json.dumps(dict(os.environ)).encode()]
    if what == "print":
        print("a stray line", flush=True)
    return [bytes(part[::-1]) for part in parts]


if __name__ == "__main__":
    serve(answer, memory=lambda num_bytes: (64 << 20) + num_bytes)
