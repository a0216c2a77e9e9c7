"""How every generating route answers: submit, then one JSON document or a stream of events.

Leaving early aborts: a stream through its response's scope, a plain answer by watching for the disconnect.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request as HttpRequest
from starlette.responses import Response

from engine.core.admission import check_request
from engine.core.errors import QuireError
from engine.core.types import Pin, Request, SamplingParams
from engine.text.choice import Delta, TextRules
from engine.text.grammars.spec import GrammarSpec
from server.client import Answer
from server.context import Context
from server.errors import to_api_error
from server.generation import ChoiceDelta, Generation
from server.http.disconnect import unless_disconnected
from server.http.slow_thread import run_slowly
from server.middleware import ENTRY, REQUEST_ID
from server.openai.formatter import ResponseFormatter
from server.openai.sampling import EngineBody, SamplingBody, seconds
from server.openai.usage import AnswerMetrics, server_timing, with_metrics
from server.operations.handoff import Receiver
from server.sse import EventStream
from server.telemetry.ledger import Entry
from server.tenancy.tenancy import TENANT, Account

logger = logging.getLogger(__name__)

MAX_INLINE_TOKENS = 4096  # with their logprobs about 10 ms; more are written beside the event loop
MAX_INLINE_PROMPT = 512  # tokens of a prompt whose log probabilities are written on the event loop, about 5 ms


def engine_requests(
    context: Context,
    body: EngineBody,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> list[Request]:
    """One engine request a prompt, under ids of our own. Raises a 404 for an adapter that has been unloaded."""
    answer_id = uuid.uuid4().hex
    adapter = context.adapter(body.model)
    if adapter is not None:
        params = [replace(own, adapter=adapter) for own in params]
        context.metrics.adapter_request(adapter.name, len(prompts))
    return [
        Request(
            request_id=f"{answer_id}-{index}",
            prompt=tuple(prompt),
            params=own,
            arrival_s=context.engine.clock(),
            priority=body.priority,
            cache_salt=body.cache_salt,
            pins=(Pin(len(prompt), body.retained_s),) if body.retained_s else (),
            deadline_s=seconds(body.deadline_ms),
            max_queue_s=seconds(body.max_queue_ms),
            is_background=context.is_background,
            tenant="" if context.tenancy.has_file else body.tenant,
        )
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


async def constrain(context: Context, asked: tuple[GrammarSpec, str] | None, params: SamplingParams) -> SamplingParams:
    """The parameters with a grammar, compiled, that a field asks for. Raises InvalidRequestError if it cannot be."""
    if asked is None or not params.max_tokens:
        return params
    return replace(params, grammar=await context.grammars.compile(*asked))


def answer_id(requests: Sequence[Request]) -> str:
    """What the answer is called outside: its requests' common name, by which the live view shows them too."""
    return requests[0].request_id.partition("-")[0]


def begin(
    http: HttpRequest, context: Context, requests: Sequence[Request], rules: TextRules, *, stream: bool = False
) -> tuple[Answer, Generation]:
    """Submit, and open an entry in the ledger. Raises what the engine, or the tenant's limits, refuse with."""
    account: Account | None = getattr(http.state, TENANT, None)
    if account is not None:
        account.check(request_s=context.engine.stats.e2e_s.mean)
        requests = _sign(context, account, requests)
    answer = context.client.submit(requests)
    if account is not None:
        account.open(requests)
    generation = Generation(answer, requests, context.tokenizer, rules)
    adapter = requests[0].params.adapter
    entry = Entry(
        request_id=getattr(http.state, REQUEST_ID),
        answer_id=answer_id(requests),
        endpoint=http.url.path,
        stream=stream,
        requests=requests,
        adapter=None if adapter is None else adapter.name,
        generation=generation,
        ledger=context.ledger,
        account=account,
    )
    setattr(http.state, ENTRY, entry)
    return answer, generation


def _sign(context: Context, account: Account, requests: Sequence[Request]) -> list[Request]:
    """Return the requests on an account, which find in the prefix cache its own blocks and those that are for all."""
    return [context.public_prefixes.mark(request) for request in account.sign(requests)]


async def _fetch(http: HttpRequest, context: Context, receiver: Receiver, requests: Sequence[Request]) -> None:
    """Have prompts computed elsewhere. Raises what `begin` would refuse with for the requests' sake or their tenant's."""
    for request in requests:
        check_request(request, context.engine.config)
    account: Account | None = getattr(http.state, TENANT, None)
    if account is not None:
        account.check(request_s=context.engine.stats.e2e_s.mean)
        requests = _sign(context, account, requests)
    await unless_disconnected(http.receive, receiver.fetch(requests))


async def respond(
    http: HttpRequest,
    context: Context,
    body: SamplingBody,
    requests: Sequence[Request],
    rules: TextRules,
    formatter: ResponseFormatter,
) -> Response:
    """Submit and answer. Raises what the engine refuses with, before anything is sent."""
    if context.receiver is not None:
        await _fetch(http, context, context.receiver, requests)
    answer, generation = begin(http, context, requests, rules, stream=body.stream)
    if body.stream:
        return EventStream(
            _frames(generation, body, formatter),
            answer,
            keep_alive_s=context.config.sse_keep_alive_interval_s,
            queue_status=partial(context.queue_status.sentence, [request.request_id for request in requests]),
        )
    deltas = await _all_deltas(http, answer, generation, body)
    usage = generation.usage
    size = usage.completion_tokens * (1 + (requests[0].params.logprobs or 0))
    is_short = size <= MAX_INLINE_TOKENS and sum(len(request.prompt) for request in requests) <= MAX_INLINE_TOKENS
    document = (
        formatter.answer(deltas, usage) if is_short else await run_slowly(lambda: formatter.answer(deltas, usage))
    )
    return with_timings(document, generation, body)


async def _all_deltas(http: HttpRequest, answer: Answer, generation: Generation, body: SamplingBody) -> list[Delta]:
    """Wait for the end, one delta a choice. A client that leaves ends it."""
    with answer:
        return await unless_disconnected(http.receive, _whole(generation, body))


async def _whole(generation: Generation, body: SamplingBody) -> list[Delta]:
    deltas = await generation.all_deltas()
    if body.include_metrics:
        await generation.settle()
    return deltas


def with_timings(document: bytes, generation: Generation, body: EngineBody) -> Response:
    """The plain answer. Its header tells what is known now, the opt-in object waited to know all."""
    spans, cached = generation.timeline.spans(), generation.num_cached_tokens
    headers = {} if spans is None else {"server-timing": server_timing(spans, cached)}
    if body.include_metrics and spans is not None:
        document = with_metrics(document, AnswerMetrics.of(spans, cached))
    return Response(document, headers=headers, media_type="application/json")


async def _frames(
    generation: Generation, body: SamplingBody, formatter: ResponseFormatter
) -> AsyncGenerator[bytes, None]:
    """The stream: news as it comes, and always an end, be it an error's."""
    try:
        if opening := formatter.opening():
            yield opening
        while news := await generation.next_deltas():
            frames = partial(formatter.news, news, lambda: generation.usage)
            yield await run_slowly(frames) if _tells_long_prompt(news) else frames()
        metrics = None
        if body.include_metrics:
            await generation.settle()
            spans = generation.timeline.spans()
            assert spans is not None, "every choice has ended"
            metrics = AnswerMetrics.of(spans, generation.num_cached_tokens)
        last = formatter.closing(generation.usage, metrics)
    except Exception as error:  # too late for a status: whatever fails becomes the stream's last event
        if not isinstance(error, QuireError):
            logger.exception("a stream failed")
        last = formatter.failure(to_api_error(error))
    yield last


def _tells_long_prompt(news: Sequence[ChoiceDelta]) -> bool:
    """True for the first of an answer that repeats a long prompt, or tells its log probabilities."""
    return any(
        delta.prompt is not None and len(delta.logprobs) + len(delta.prompt.logprobs or ()) > MAX_INLINE_PROMPT
        for _, delta in news
    )
