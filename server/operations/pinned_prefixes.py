"""--pinned-prefixes: prompt prefixes that are computed at start and kept cached.

    {"messages": [{"role": "system", "content": "You are ..."}], "tools": [...]}      as for /v1/chat/completions
    {"prompt": "Once upon a time", "cache_salt": "tales"}                              as for /v1/completions

One JSON object a line. Of a conversation, the prefix is the part that it shares with every continuation by a user's
message. Read on the thread that starts the daemon, computed on the event loop before the daemon is ready.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

from pydantic import ValidationError

from engine.core.errors import ClientError, ConfigError, InvalidRequestError, QuireError, ServerError
from engine.core.scheduling.admission import check_request
from engine.core.types import FinishReason, Pin, Request, SamplingParams
from engine.handle import EngineHandle
from engine.text.chat.limits import num_common
from engine.text.fields.chat import Message
from server.answers.client import EngineClient
from server.answers.model import ServedModel
from server.openai.chat import ChatBody
from server.openai.completions import CompletionBody
from server.protocol.errors import ApiError, to_api_error
from server.settings.files import read_setting_file

log = logging.getLogger("quire.serve")

LOG_EVERY_S = 10.0  # between two lines of progress
_PROBES = ("-", "+")  # two beginnings of a user's message


def read_prefixes(path: Path, model: ServedModel, engine: EngineHandle) -> list[Request]:
    """Return the requests that compute them. Raises ConfigError, with the line."""
    lines = read_setting_file("--pinned-prefixes", path).split("\n")  # JSON strings may have other line breaks
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests += _requests(line, model, engine)
        except (json.JSONDecodeError, ValidationError, ClientError, ApiError) as error:
            error_answer = str(error) if isinstance(error, json.JSONDecodeError) else to_api_error(error).message
            raise ConfigError(f"--pinned-prefixes {path}, line {number}: {error_answer}") from error
    return requests


async def compute_prefixes(requests: Sequence[Request], client: EngineClient) -> None:
    """Compute the prefixes; log those that failed or found no room."""
    clock, config = client.engine.clock, client.engine.config
    begun_s = logged_s = clock()
    num_tokens = num_pinned = num_failed = 0
    log.info("computing %d pinned prefixes, %d tokens", len(requests), sum(len(one.prompt) for one in requests))
    for number, request in enumerate(requests):  # one after another: if not all fit, the first ones do
        if clock() - logged_s >= LOG_EVERY_S:
            logged_s = clock()
            log.info("%d of %d pinned prefixes are computed", number, len(requests))
        try:
            num_pinned += await _compute(request, client)
            num_tokens += len(request.prompt) // config.block_size * config.block_size
        except QuireError as error:
            if client.is_draining:
                log.info("Stopped before all pinned prefixes were computed.")
                return
            num_failed += 1
            log.error("Pinned prefix %d of %d failed: %s", number + 1, len(requests), error)  # noqa: TRY400 - a sentence
    message = "pinned prefixes: %d, %d tokens in whole blocks, computed in %.1f s"
    log.info(message, len(requests) - num_failed, num_tokens, clock() - begun_s)
    if num_pinned < num_tokens:
        message = "Only %d of these tokens are pinned: --pinned-prefix-share is %g of a pool of %d tokens; raise either"
        log.warning(message, num_pinned, config.pinned_share, config.num_blocks * config.block_size)


async def _compute(request: Request, client: EngineClient) -> int:
    """Compute one and return its pinned tokens. Raises QuireError if it failed."""
    num_pinned = 0
    answer = client.submit([request])
    with answer:
        while True:
            event = (await answer.take())[-1].event
            if event.prompt is not None:
                num_pinned = event.prompt.num_pinned_tokens
            if event.finish_reason is FinishReason.LENGTH:
                return num_pinned
            if event.finish_reason is not None:
                ended = ServerError(f"it ended as {event.finish_reason.value}.")
                raise ended if event.error is None else event.error.exception()


def _requests(line: str, model: ServedModel, engine: EngineHandle) -> list[Request]:
    asked = json.loads(line)
    if not isinstance(asked, dict) or ("messages" in asked) == ("prompt" in asked):
        raise InvalidRequestError("it must be a JSON object with either messages or a prompt.")
    body = (ChatBody if "messages" in asked else CompletionBody).model_validate_json(line)
    if ignored := body.without_effect(model.limits):
        raise InvalidRequestError(f"fields without effect: {', '.join(ignored)}; remove them.")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "truncate_prompt_tokens cuts off beginnings, which are what is kept here; leave it out."
        )
    if isinstance(body, ChatBody) and body.images:
        raise InvalidRequestError("it has images, and prefixes of text alone are kept; leave them out.")
    if body.model is not None and not any(model.has(body.model, aliases=aliases) for aliases in (False, True)):
        raise InvalidRequestError(f"the model {body.model!r} is not served.")
    adapter = model.find(body.model).adapter
    requests = [
        Request(
            request_id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=0, adapter=adapter),
            arrival_s=engine.clock(),
            cache_salt=body.cache_salt,
            pins=(Pin(len(prompt), inf),),
        )
        for prompt in _prompts(body, model)
    ]
    for request in requests:
        check_request(request, engine.config)
    return requests


def _prompts(body: ChatBody | CompletionBody, model: ServedModel) -> list[list[int]]:
    prompts: list[str | list[int]]
    if isinstance(body, CompletionBody):
        prompts = body.prompt
        for prompt in prompts:
            if not isinstance(prompt, str):
                model.limits.check_ids(prompt, "prompt")
    else:
        shown = [
            model.preprocessor.render(
                body.model_copy(update={"messages": [*body.messages, Message(role="user", content=word)]})
            )
            for word in _PROBES
        ]
        prompts = [shown[0][: num_common(*shown)]]
    encode = partial(model.tokenizer.encode, add_special_tokens=body.add_special_tokens)
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
