"""Answers every request that runs the engine: a JSON document, or a stream.

A disconnect aborts the request: a stream by leaving its response's scope, a plain answer by watching for the disconnect.
Event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request as HttpRequest
from pydantic_core import to_json
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.errors import QuireError
from engine.core.scheduling.admission import check_request
from engine.core.types import Adapter, Params, Pin, Request, SamplingParams, TokenEvent
from engine.text.chat.choice import TextRules
from engine.text.requests.chat_preprocessor import PreparedChat
from engine.text.tokenizer import TextTokenizer
from server.answers.body import EngineBody, KVTransferParams, SamplingBody
from server.answers.client import Answer, EngineClient
from server.answers.content_guard import ContentGuard, GuardedGeneration, Turns, talks
from server.answers.formatter import ChunkMeta, ResponseFormatter
from server.answers.generation import ChoiceDelta, Generation
from server.answers.handoff import Receiver, Sender
from server.answers.model import aside
from server.http.connection import CHUNKS, ChunkWriter
from server.http.middleware import RequestState, caller_of, state_of
from server.http.threads import run_slowly, unless_disconnected
from server.protocol.documents import Usage
from server.protocol.errors import STATE, ApiError, to_api_error
from server.settings.app_config import AppConfig
from server.telemetry.answer_metrics import AnswerMetrics, server_timing, with_metrics
from server.telemetry.events import TAG_CHARS, Listener, RequestOpened, RequestRecord
from server.telemetry.live import LiveView

logger = logging.getLogger(__name__)

MAX_INLINE_TOKENS = 4096  # with their logprobs about 10 ms; more are written on the slow thread
MAX_INLINE_PROMPT = 512  # tokens of a prompt whose log probabilities are written on the event loop, about 5 ms
PING = ServerSentEvent(comment="ping", sep="\n").encode()  # clients ignore it, proxies see that the connection lives
STATUS_S = 1.0  # how often a stream that has not begun looks up its place in the queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Responder:
    """Makes engine requests, submits them and answers. Made once for each model."""

    client: EngineClient
    tokenizer: TextTokenizer
    live: LiveView
    emit: Listener
    config: AppConfig
    call_id_length: int  # of a tool call, where the model's template insists on one; else 0
    has_tenants: bool  # of --tenants; else a request names its own
    sender: Sender | None = None  # of a prefill daemon
    receiver: Receiver | None = None  # of a decode daemon
    guard: ContentGuard | None = None  # whose verdict texts wait for

    def requests(
        self,
        body: EngineBody,
        adapter: Adapter | None,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Params],
    ) -> list[Request]:
        """Return one engine request a prompt."""
        answer_id = uuid.uuid4().hex
        if adapter is not None:
            params = [replace(each, adapter=adapter) for each in params]
        retained_s, arrival_s = body.retained_s, self.client.engine.clock()
        return [
            Request(
                request_id=f"{answer_id}-{index}",
                prompt=tuple(prompt),
                params=each,
                arrival_s=arrival_s,
                priority=body.priority,
                cache_salt=body.cache_salt,
                pins=(Pin(len(prompt), retained_s),) if retained_s else (),
                deadline_s=body.deadline_ms and body.deadline_ms / 1e3,
                max_queue_s=body.max_queue_ms and body.max_queue_ms / 1e3,
                tenant="" if self.has_tenants else body.tenant,
                is_further=index > 0,
            )
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    def chat_requests(self, body: EngineBody, adapter: Adapter | None, chat: PreparedChat) -> list[Request]:
        """Return the engine request of a conversation, as a list."""
        [request] = self.requests(body, adapter, [chat.prompt], [chat.params])
        images = tuple([each.image for each in chat.images])
        return [replace(request, turn_end=chat.turn_end, spans=chat.spans, images=images)]

    def meta(self, requests: Sequence[Request], *, id_prefix: str, model: str) -> ChunkMeta:
        """Return the fields that all chunks of the requests' answer share."""
        return ChunkMeta(
            id_prefix=id_prefix,
            model=model,
            tokenizer=self.tokenizer,
            prompts=[request.prompt for request in requests],
            answer_id=answer_id(requests),
            has_usage=self.config.enable_force_include_usage,
            has_token_ids=self.config.return_tokens_as_token_ids,
            call_id_length=self.call_id_length,
        )

    def submit(
        self,
        http: HttpRequest,
        requests: Sequence[Request],
        rules: TextRules,
        *,
        stream: bool = False,
        turns: Sequence[Turns] | None = None,
    ) -> tuple[Answer, Generation]:
        """Submit requests and record them; `turns` are what the guard takes prompts for.

        Raises what the tenant's limits or the engine refuse with.
        """
        state: RequestState = http.scope[STATE]
        if turns is not None and self.guard is not None:
            requests = [replace(request, is_held=True) for request in requests]
        account, requests = state.account, self.admit(state, requests)
        answer = self.client.submit(requests)
        if account is not None:
            account.charge_prompts(requests)
        if turns is None or self.guard is None:
            generation = Generation(answer, requests, self.tokenizer, rules)
        else:
            generation = GuardedGeneration(self.guard, turns, answer, requests, self.tokenizer, rules)
        adapter = requests[0].params.adapter
        if rules.turn is not None:
            rules.turn.begin(state.request_id[:TAG_CHARS])
        state.record = RequestRecord(
            request_id=state.request_id,
            answer_id=answer_id(requests),
            endpoint=http.url.path,
            model=self.config.served_model_names[0],
            stream=stream,
            requests=requests,
            adapter=None if adapter is None else adapter.name,
            generation=generation,
            turn=rules.turn,
            account=account,
            caller=None if state.begun_s is None else caller_of(http.scope),
            ignored_fields=state.ignored_fields,
        )
        self.emit(RequestOpened(state.record))
        return answer, generation

    def admit(self, state: RequestState, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests on the caller's account, if it has one. Raises OverloadedError."""
        if state.is_background:
            requests = [replace(request, is_background=True) for request in requests]
        if state.account is None:
            return requests
        state.enter(self.client.engine.stats.e2e_s.mean)
        return state.account.sign(requests)

    async def respond(
        self,
        http: HttpRequest,
        body: SamplingBody,
        requests: Sequence[Request],
        rules: TextRules,
        make: Callable[[], ResponseFormatter],
    ) -> Response:
        """Submit requests and return their answer, in the format of what `make` makes once the engine has them.

        Raises what the engine refuses with, before anything is sent.
        """
        transfer = body.kv_transfer_params
        if transfer is not None and (transfer.do_remote_decode or transfer.do_remote_prefill):
            requests = await self._hand_over(http, body, requests, transfer)
        turns = None if self.guard is None else talks(body, requests, self.tokenizer)
        answer, generation = self.submit(http, requests, rules, stream=body.stream, turns=turns)
        if isinstance(generation, GuardedGeneration):
            await unless_disconnected(http.receive, generation.read_prompts())
        if not body.stream:
            return await self._whole(http, body, answer, generation, make)
        status = partial(self.live.status, [request.request_id for request in requests])
        keep_alive_s = self.config.sse_keep_alive_interval_s
        return EventStream(
            answer, generation, make, wants_metrics=body.include_metrics, keep_alive_s=keep_alive_s, status=status
        )

    async def _whole(
        self,
        http: HttpRequest,
        body: SamplingBody,
        answer: Answer,
        generation: Generation,
        make: Callable[[], ResponseFormatter],
    ) -> Response:
        """Return the answer as one document."""
        record, transfer = state_of(http.scope).record, body.kv_transfer_params
        assert record is not None, "left by `submit`"
        requests = record.requests
        with answer:
            formatter = await aside(make)
            deltas = await unless_disconnected(http.receive, generation.all_deltas(settled=body.include_metrics))
        usage = generation.usage
        write = partial(formatter.answer, deltas, usage)
        num_logprobs = usage.completion_tokens * (1 + (requests[0].params.logprobs or 0))
        is_long = max(num_logprobs, sum(len(request.prompt) for request in requests)) > MAX_INLINE_TOKENS
        document = await run_slowly(write) if is_long else write()
        if self.sender is not None and transfer is not None and transfer.do_remote_decode:
            offered = await unless_disconnected(http.receive, self.sender.offer(requests[0]))
            document = document[:-1] + b',"kv_transfer_params":' + to_json(offered) + b"}"
        return with_timings(document, generation, body)

    # -- hand-over ---------------------------------------------------------------------------------------------------

    async def _hand_over(
        self, http: HttpRequest, body: SamplingBody, requests: Sequence[Request], transfer: KVTransferParams
    ) -> Sequence[Request]:
        """Return the request to submit: on a prefill daemon for one token, on a decode daemon once its K/V is here.

        Raises ApiError.
        """
        if len(requests) > 1:
            message = f"kv_transfer_params is of one prompt, and there are {len(requests)}; send each in a request."
            raise ApiError(400, "invalid_value", message, "prompt")
        if self.receiver is not None and transfer.do_remote_prefill:
            check_request(requests[0], self.client.engine.config)
            [request] = self.admit(state_of(http.scope), requests)
            await unless_disconnected(http.receive, self.receiver.fetch(request, transfer))
        if self.sender is None or not transfer.do_remote_decode:
            return requests
        if body.stream:
            message = "A prompt that is computed for another daemon is not streamed; leave stream out."
            raise ApiError(400, "invalid_value", message, "stream")
        params = requests[0].params
        assert isinstance(params, SamplingParams), "the body is of one that generates"
        params = replace(params, max_tokens=min(params.max_tokens, 1), min_tokens=0)
        return [replace(requests[0], params=params)]


def answer_id(requests: Sequence[Request]) -> str:
    """Return the shared part of the request ids, which is in the answer's id."""
    return requests[0].request_id.partition("-")[0]


def with_timings(document: bytes, generation: Generation, body: EngineBody) -> Response:
    """Return a plain answer, with its timings in a header.

    If the body asks for them, they are in the document, too.
    """
    spans, cached = generation.timeline.spans(), generation.num_cached_tokens
    headers = {} if spans is None else {"server-timing": server_timing(spans, cached)}
    if body.include_metrics and spans is not None:
        document = with_metrics(document, AnswerMetrics.of(spans, cached))
    return Response(document, headers=headers, media_type="application/json")


def _has_long_prompt(news: Sequence[ChoiceDelta]) -> bool:
    """Return whether deltas repeat a long prompt, or report its log probabilities."""
    for _, delta in news:  # a loop, since a generator would cost each token half a microsecond
        if delta.prompt is not None and len(delta.logprobs) + len(delta.prompt.logprobs or ()) > MAX_INLINE_PROMPT:
            return True
    return False


class EventStream(EventSourceResponse):
    """Streams frames while its answer's scope is open; a client that leaves aborts the request.

    sse-starlette makes the response: its type, its headers, its comments. The sending loop is replaced: a token costs no
    task, timer or lock. Where the connection writes chunks (http/connection.py), one that has nothing to wait for is sent
    from the mailbox and wakes no task.
    """

    def __init__(
        self,
        answer: Answer,
        generation: Generation,
        make: Callable[[], ResponseFormatter],
        *,
        wants_metrics: bool,
        keep_alive_s: float,
        status: Callable[[], Awaitable[str]],
    ) -> None:
        """After `keep_alive_s` without a frame a comment is sent, never if it is 0.

        `status` returns the text of the comment while the request waits.
        """
        self._frames = self._make_frames()
        super().__init__(self._frames, sep="\n")
        del self.headers["connection"]  # the server sets it, and to "close" where the client asks for that
        self._answer, self._generation = answer, generation
        self._make, self._wants_metrics = make, wants_metrics
        self._formatter: ResponseFormatter | None = None  # made when the first frame is asked for
        self._keep_alive_s = keep_alive_s
        self._status = status
        self._sent_s = 0.0
        self._is_over = False
        self._commenting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the last frame, or until the client disconnects."""
        extension = scope.get("extensions", {}).get(CHUNKS)
        if extension is not None:
            self._answer.take_now = partial(self._send_now, extension["writer"], asyncio.get_running_loop().time)
        with self._answer, contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._send_all(send))

    def _send_now(self, chunks: ChunkWriter, clock: Callable[[], float], events: list[TokenEvent]) -> bool:
        """Send tokens that go on, and return whether the task may sleep on; all is left to it if there is more to them."""
        formatter, generation = self._formatter, self._generation
        if formatter is None or not chunks.is_free or (news := generation.deltas_now(events)) is None:
            return False
        if news:
            chunks.write(formatter.news(news, self._count))
            self._sent_s = clock()
        return generation.num_open > 0

    def _count(self) -> Usage:
        return self._generation.usage

    async def _make_frames(self) -> AsyncGenerator[bytes, None]:
        """Yield all that `_send_now` does not send.

        An exception becomes the last frame, as the status has been sent.
        """
        generation = self._generation
        formatter = self._formatter = await aside(self._make)
        try:
            if opening := formatter.opening():
                yield opening
            while news := await generation.next_deltas():
                if _has_long_prompt(news):
                    yield await run_slowly(partial(formatter.news, news, self._count))
                else:
                    yield formatter.news(news, self._count)
            metrics = None
            if self._wants_metrics:
                await generation.settle()
                spans = generation.timeline.spans()
                assert spans is not None, "every choice has ended"
                metrics = AnswerMetrics.of(spans, generation.num_cached_tokens)
            last = formatter.closing(generation.usage, metrics)
        except Exception as error:  # any: it ends this stream alone, with an event
            if not isinstance(error, QuireError | ApiError):
                logger.exception("a stream failed")
            last = formatter.failure(to_api_error(error))
        yield last

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        first = (
            loop.call_later(min(STATUS_S, self._keep_alive_s), self._start_comments, send)
            if self._keep_alive_s
            else None
        )
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sent_s = loop.time()
        finally:
            self._is_over = True  # before Python 3.12 wait_for may swallow a cancellation
            for waiting in (first, self._commenting):
                if waiting is not None:
                    waiting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start_comments(self, send: Send) -> None:
        self._commenting = asyncio.ensure_future(self._comment(send))

    async def _comment(self, send: Send) -> None:
        """Send comments while the stream is silent.

        Until it begins, they are its status whenever that changes, then pings.
        """
        clock = asyncio.get_running_loop().time
        last = ""
        while not self._is_over:
            status = "" if self._answer.has_begun else await self._read_status()
            comment = b""
            if status not in ("", last):
                last = status
                comment = ServerSentEvent(comment=status, sep="\n").encode()
            elif clock() - self._sent_s >= self._keep_alive_s:
                comment = PING
            if comment:
                self._sent_s = clock()
                await send({"type": "http.response.body", "body": comment, "more_body": True})
            rest_s = self._sent_s + self._keep_alive_s - clock()
            await asyncio.sleep(max(rest_s if self._answer.has_begun else min(STATUS_S, rest_s), 0.0))

    async def _read_status(self) -> str:
        """Return the status, or "" if a long step keeps the engine from replying."""
        with contextlib.suppress(ApiError, asyncio.TimeoutError):  # not the builtin's before Python 3.11
            return await asyncio.wait_for(self._status(), min(STATUS_S, self._keep_alive_s))
        return ""
