"""LLM: an engine in this process, fed by the calling threads.

The engine's events arrive through a queue.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import Self

from engine.config import EngineConfig, LoraModule
from engine.core.admission import check_request
from engine.core.errors import ClientError, ConfigError, InvalidRequestError, OverloadedError, ShuttingDownError
from engine.core.types import AbortCause, Adapter, Grammar, Request, StepEvents, TokenEvent
from engine.core.types import SamplingParams as EngineParams
from engine.draft_source import fetch_models
from engine.llm.job import Job, RequestOutput
from engine.llm.params import SamplingParams
from engine.loop import Engine
from engine.model_check import check_model
from engine.model_source import find_model
from engine.setting import declared, expand, features
from engine.startup_progress import StartupProgress
from engine.text.channels import CHANNEL_NAMES
from engine.text.chat_preprocessor import ChatPreprocessor
from engine.text.choice import TextRules
from engine.text.fields.sampling import Constraint, QueueFields
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.limits import ModelLimits
from engine.text.reasoning import REASONING_TAGS
from engine.text.sampling import sampling_params, seconds, text_rules, truncated
from engine.text.tokenizer import check_draft_tokenizer, load_tokenizer
from engine.text.tools.formats import TOOL_FORMATS

logger = logging.getLogger(__name__)

_RETRY_S = 0.01

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and its engine.

    A context manager; `close` or the end of the program ends the engine.

    `model` is what `quire serve` takes, None for the embedded one; `engine` takes the daemon's flags by their Python
    names (`dtype="float32"`, `num_threads=2`, ...). `lora_modules` maps the names that `lora` takes to folders of
    adapters. Raises ConfigError, ModelLoadError or MemoryBudgetError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        max_logprobs: int = 20,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        lora_modules: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> None:
        _check_choice("tool_call_parser", tool_call_parser, TOOL_FORMATS)
        _check_choice("reasoning_parser", reasoning_parser, (*REASONING_TAGS, *CHANNEL_NAMES))
        source = find_model(model)
        modules = tuple(LoraModule(name, str(path)) for name, path in (lora_modules or {}).items())
        config = _engine_config(source.path, {"lora_modules": modules, **engine})
        check_model(config, has_tokenizer=tokenizer is not None)
        from engine.build import build_engine  # torch, seconds

        with StartupProgress() as startup:
            config = fetch_models(config, startup.report)
            built = build_engine(config, startup.report)
            text = load_tokenizer(tokenizer or config.model, chat_template=chat_template)
            text.hold_to(built.vocab_size)
            check_draft_tokenizer(text, config.speculative_config)
        self._engine = built
        self._tokenizer = text
        self._grammars = GrammarCompiler(text, built.vocab_size)
        self._limits = ModelLimits.of(
            built.config,
            built.vocab_size,
            text,
            max_logprobs=max_logprobs,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        self._preprocessor = ChatPreprocessor(self._limits)
        self._events: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._turn = threading.Lock()  # one call at a time
        self._end = weakref.finalize(self, _end, built, self._grammars)
        built.start(self._events.put)  # not a bound method: the thread would keep a forgotten LLM alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine thread and release the model. Idempotent."""
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids, and return results in order.

        Raises ClientError before anything runs, or the error of a request that fails. An error or Ctrl-C ends all
        requests of the call; the LLM can be used again.
        """
        listed = _listed(prompts)
        each = _for_each(sampling_params, len(listed))
        adapter = self._adapter(lora)
        makers = [partial(self._continuation, *one, adapter) for one in zip(listed, each, strict=True)]
        return self._run(makers, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; like `generate` in everything else.

        The fields are those of /v1/chat/completions. An answer's text is without its thoughts and tool calls, and its
        `message` continues the conversation.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        shared = {
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "tool_choice": dict(tool_choice) if isinstance(tool_choice, Mapping) else tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "reasoning_effort": reasoning_effort,
            "thinking_token_budget": thinking_token_budget,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        each, adapter = _for_each(sampling_params, len(conversations)), self._adapter(lora)
        makers = [
            partial(self._reply, {**shared, "messages": list(one)}, own, adapter)
            for one, own in zip(conversations, each, strict=True)
        ]
        return self._run(makers, progress)

    def _run(self, makers: Sequence[Callable[[], Job]], progress: bool) -> list[RequestOutput]:
        if not self._end.alive:
            raise ShuttingDownError("This LLM was closed; make a new one.")
        jobs = []
        for index, make in enumerate(makers):
            with _naming(index, len(makers)):
                jobs.append(make())
        with self._turn:
            self._answer(jobs, show=progress)
        return [job.output() for job in jobs]

    def _adapter(self, name: str | None) -> Adapter | None:
        loaded = None if name is None else self._engine.adapters.find(name)
        if name is not None and loaded is None:
            known = ", ".join(other.adapter.name for other in self._engine.adapters.all()) or "none"
            raise InvalidRequestError(f"lora is {name!r}; of lora_modules there are: {known}.", param="lora")
        return None if loaded is None else loaded.adapter

    def _continuation(self, prompt: Prompt, params: SamplingParams, adapter: Adapter | None) -> Job:
        """Return the job of a prompt. Raises ClientError."""
        limits, body = self._limits, params
        text = None
        if isinstance(prompt, str):
            text = prompt
            limits.check_length(len(text), "prompt")
            ids = self._tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = _token_ids(prompt)
            limits.check_ids(ids, "prompt")
        if not ids:
            raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
        ids = truncated(body, ids, limits)
        limits.check_logprobs(body.logprobs, "logprobs")
        asked = body.max_tokens
        engine_params = sampling_params(
            body,
            limits,
            max_tokens=limits.rest_of_context(len(ids), "prompt") if asked is None else asked,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        constraint = next(iter(body.constraints()), None) if engine_params.max_tokens else None
        engine_params = replace(engine_params, grammar=self._compile(constraint), adapter=adapter)
        return self._job(text, ids, engine_params, text_rules(body, engine_params), body)

    def _reply(self, conversation: Mapping[str, Any], params: SamplingParams, adapter: Adapter | None) -> Job:
        """Return the job of a conversation. Raises ClientError."""
        body = params.to_chat(conversation)
        self._limits.check_logprobs(params.logprobs, "logprobs")
        chat = self._preprocessor.prepare(body)
        chat = chat.constrained(self._compile(chat.constraint))
        return self._job(chat.text, chat.prompt, replace(chat.params, adapter=adapter), chat.rules, body)

    def _compile(self, constraint: Constraint | None) -> Grammar | None:
        """Return the grammar that a field asks for. Raises InvalidRequestError."""
        return None if constraint is None else self._grammars.compile_now(*constraint)

    def _job(
        self, text: str | None, ids: Sequence[int], params: EngineParams, rules: TextRules, body: QueueFields
    ) -> Job:
        if dropped := body.dropped_hints(self._limits):
            logger.warning("without effect here: %s", ", ".join(dropped))
        request = Request(
            request_id=str(next(self._ids)),
            prompt=tuple(ids),
            params=params,
            arrival_s=0.0,
            priority=body.priority,
            deadline_s=seconds(body.deadline_ms),
            max_queue_s=seconds(body.max_queue_ms),
        )
        check_request(request, self._engine.config)
        return Job(text, request, rules, self._tokenizer, call_id_length=self._limits.call_id_length)

    def _answer(self, jobs: Sequence[Job], *, show: bool) -> None:
        """Run jobs to their end, or abort them all."""
        waiting = deque(jobs)
        started: dict[str, Job] = {}
        most = 2 * self._engine.config.max_num_seqs  # so that the queue is never empty, and stays short
        num_tokens = 0
        try:
            with _bar(show) as bar:
                task = bar.add_task("generate", total=len(jobs), rate="")
                while waiting or started:
                    self._feed(waiting, started, most)
                    for event in self._events.get():
                        num_tokens += len(event.token_ids)
                        self._take(event, started)
                    rate = num_tokens / (bar.tasks[task].elapsed or 1e-9)
                    bar.update(task, completed=len(jobs) - len(waiting) - len(started), rate=f"{rate:,.0f} tokens/s")
        finally:
            for request_id in started:  # their later events are ignored: no id is used twice
                self._engine.abort(request_id, AbortCause.DISCONNECT)

    def _feed(self, waiting: deque[Job], started: dict[str, Job], most: int) -> None:
        while waiting and len(started) < most:
            job = waiting[0]
            try:
                self._engine.submit(replace(job.request, arrival_s=self._engine.clock()))
            except OverloadedError:
                if started:
                    return  # the queue is full of this call's requests; the next one that ends makes room
                time.sleep(_RETRY_S)  # an interrupted call's requests are about to leave the queue
                continue
            started[job.request.request_id] = waiting.popleft()

    def _take(self, event: TokenEvent, started: dict[str, Job]) -> None:
        job = started.get(event.request_id)
        if job is None:
            return
        if job.accept(event):
            self._engine.abort(event.request_id, AbortCause.STOP_STRING, event.choice)
        if not job.num_open:
            del started[event.request_id]


def _engine_config(path: str, flags: Mapping[str, Any]) -> EngineConfig:
    settings = declared(EngineConfig)
    known = [each.name for each in settings if not each.setting.feature] + list(features(settings))
    values, notices = expand(settings, flags)
    for name in values.keys() - {each.name for each in settings}:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
        raise ConfigError(f"{name} is not a setting of the engine; {hint}")
    for notice in notices:
        logger.warning(notice)
    try:
        return EngineConfig(model=path, **values)
    except TypeError as error:  # a string where a number is compared
        raise ConfigError(f"A setting of the engine has the wrong type: {error}.") from error


def _end(engine: Engine, grammars: GrammarCompiler) -> None:
    engine.stop(0.0)
    grammars.close()


def _check_choice(name: str, value: str, known: Collection[str]) -> None:
    if value not in ("auto", "none", *known):
        raise ConfigError(f"{name} is {value!r}; choose auto, none, {', '.join(known)}.")


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return one set of parameters for each prompt."""
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequestError(
            f"There are {num_prompts} prompts and {len(each)} sampling_params; give one for all, or one each.",
            param="sampling_params",
        )
    return each


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list; a single prompt may come without one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is a {type(prompts).__name__}; give a text, token ids, or a list of these.", param="prompts"
        )
    is_ids = bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if is_ids else prompts  # type: ignore[list-item,return-value]  # the first item decides


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Name the prompt in a ClientError raised in here, if there are several."""
    try:
        yield
    except ClientError as error:
        if count == 1:
            raise
        error.args = (f"Prompt {index} of {count}: {error}",)
        raise


def _token_ids(prompt: Sequence[int]) -> list[int]:
    if not isinstance(prompt, Sequence) or not all(type(token_id) is int for token_id in prompt):
        raise InvalidRequestError("A prompt must be a text or a list of token ids.", param="prompts")
    return list(prompt)


def _bar(show: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not (show and (console.is_terminal or console.is_jupyter)),
    )
