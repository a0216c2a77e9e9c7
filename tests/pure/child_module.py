"""What tests of engine/system/child_process.py run in a child: it does as the question says."""

from __future__ import annotations

import json
import os
import time

from engine.system.child_process import Limits, Parts, serve


def answer(parts: Parts) -> list[bytes]:
    what = bytes(parts[0]).decode()
    if what == "hang":
        time.sleep(3600)
    if what.startswith("spin"):
        end_s = time.process_time() + float(what.removeprefix("spin"))
        while time.process_time() < end_s:
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
    if "CHILD_EXITS" in os.environ:
        os._exit(3)
    if "CHILD_HANGS" in os.environ:
        time.sleep(3600)
    serve(answer, Limits(memory=64 << 20, memory_per_byte=1, cpu_s=0.5))
