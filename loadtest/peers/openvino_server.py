"""Serves OpenVINO GenAI's continuous batching to greedy streaming requests.

The peer's Python runs this file, so it imports only openvino_genai and the standard library. The engine thread owns the
pipeline: it takes requests from a queue, steps, and hands all tokens of a step to the event loop in one call.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json
import queue
import threading
from typing import Any, NamedTuple

import openvino_genai  # type: ignore[import-not-found, unused-ignore]

_HEAD = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"


class Job(NamedTuple):
    """A request for the engine thread; None ends the queue of its token ids."""

    prompt: str
    max_tokens: int
    ignore_eos: bool
    answers: asyncio.Queue[list[int] | None]


class Engine(threading.Thread):
    """Owns the pipeline."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True, name="engine")
        self.inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._pipeline = pipeline
        self._loop = loop
        self._open: list[tuple[Any, Job]] = []
        self._count = 0

    def run(self) -> None:
        while True:
            if not self._open:
                self._admit(self.inbox.get())
            while not self.inbox.empty():
                self._admit(self.inbox.get())
            self._pipeline.step()
            self._deliver()

    def _admit(self, job: Job) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = job.ignore_eos
        config.do_sample = False
        self._count += 1
        self._open.append((self._pipeline.add_request(self._count, job.prompt, config), job))

    def _deliver(self) -> None:
        batch: list[tuple[Job, list[int] | None]] = []
        still_open = []
        for handle, job in self._open:
            ended = False
            while handle.can_read():
                for output in handle.read().values():
                    batch.append((job, list(output.generated_ids)))
                    ended = ended or output.finish_reason != openvino_genai.GenerationFinishReason.NONE
            if ended:
                batch.append((job, None))
            else:
                still_open.append((handle, job))
        self._open = still_open
        if batch:
            self._loop.call_soon_threadsafe(_hand_over, batch)


def _hand_over(batch: list[tuple[Job, list[int] | None]]) -> None:
    for job, ids in batch:
        job.answers.put_nowait(ids)


class Front:
    """HTTP on the event loop."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        # decode() takes 0.24 ms a call; a table of the tokens' bytes is faster, so that HTTP does not distort the figures.
        self._pieces = {token_id: piece for piece, token_id in tokenizer.get_vocab().items()}
        self._name = name

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, body = await _read_request(reader)
            if method == "POST" and path == "/v1/completions":
                await self._complete(json.loads(body), writer)
            elif path == "/v1/models":
                writer.write(_HEAD % (b"200 OK", b"application/json"))
                writer.write(json.dumps({"object": "list", "data": [{"id": self._name}]}).encode())
            else:
                writer.write(_HEAD % (b"404 Not Found", b"text/plain"))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        job = Job(body["prompt"], body["max_tokens"], bool(body.get("ignore_eos")), asyncio.Queue())
        num_prompt = self._tokenizer.encode(job.prompt).input_ids.shape[1]
        self._engine.inbox.put(job)
        writer.write(_HEAD % (b"200 OK", b"text/event-stream"))
        text, num_tokens = codecs.getincrementaldecoder("utf-8")("replace"), 0
        while (ids := await job.answers.get()) is not None:
            num_tokens += len(ids)
            if piece := text.decode(b"".join(self._pieces[token_id] for token_id in ids)):
                _event(writer, {"choices": [{"index": 0, "text": piece, "finish_reason": None}]})
        reason = "length" if num_tokens >= job.max_tokens else "stop"
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(document).encode() + b"\n\n")


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    lengths = [line.split(":")[1] for line in head[1:] if line.lower().startswith("content-length:")]
    return method, path, await reader.readexactly(int(lengths[0]) if lengths else 0)


def _pipeline(options: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.kv_cache_gib
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": options.num_threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }
    return openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)


async def _main(options: argparse.Namespace) -> None:
    pipeline = _pipeline(options)
    engine = Engine(pipeline, asyncio.get_running_loop())
    engine.start()
    front = Front(engine, pipeline.get_tokenizer(), options.name)
    server = await asyncio.start_server(front.serve, "127.0.0.1", options.port, backlog=512)
    async with server:
        await server.serve_forever()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file or a folder of OpenVINO's own format")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="model")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--kv-cache-gib", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(_main(_options()))
