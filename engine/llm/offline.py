"""LLM: an engine in this process, fed by the calling threads.

The engine's events arrive through a queue.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from engine.core.errors import ConfigError, InvalidRequestError, OverloadedError, ShuttingDownError, read_each
from engine.core.scheduling.admission import check_request
from engine.core.types import AbortCause, Adapter, GrammarKey, Params, Request, StepEvents, TokenEvent
from engine.handle import CompileGrammar, EngineHandle, UseVocabulary
from engine.images import most_images
from engine.llm.arguments import adapters_of, check_beside_settings, check_kind, engine_config, for_each, typed
from engine.llm.job import Job, RequestOutput
from engine.llm.params import SamplingParams
from engine.llm.prompts import Prompt, ReadPrompt, listed, read_prompt, with_addresses
from engine.llm.unserved import missing, refuse_arguments
from engine.llm.vectors import VectorMethods
from engine.sources.draft_source import fetch_models
from engine.sources.model_source import check_embedded, find_model
from engine.startup.ahead import begin_weights
from engine.startup.model_check import check_model
from engine.system.progress import StartupProgress, run_bars
from engine.text.chat.choice import TextRules
from engine.text.chat.limits import ModelLimits
from engine.text.chat_template import read_template
from engine.text.fields.sampling import Constraint, QueueFields
from engine.text.requests.chat_preprocessor import ChatPreprocessor, no_images, sampling_params, text_rules, truncated
from engine.text.requests.default_sampling import check_sampling_source, default_sampling
from engine.text.tokenizer import TextTokenizer
from engine.text.tokenizer_files import check_draft_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from engine.llm.pictures import Pictures

logger = logging.getLogger(__name__)

_RETRY_S = 0.01

Messages = Sequence[Mapping[str, Any]]


class LLM(VectorMethods):
    """A model and its engine.

    A context manager; `close` or the end of the program ends the engine.

    `model` is what `quire serve` takes, None for the embedded one; `engine` takes the daemon's flags by their Python
    names (`dtype="float32"`, `num_threads=2`, ...). `lora_modules` maps the names that `lora` takes to folders of
    adapters. vLLM's arguments mean what its flags mean to `quire serve`. A field that SamplingParams leaves out has the
    value of the model's generation_config.json; `generation_config="vllm"` takes OpenAI's, and
    `override_generation_config` sets others. Raises ConfigError, ModelLoadError or MemoryBudgetError.
    """

    @typed(ConfigError)
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
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        limit_mm_per_prompt: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        allowed_local_media_path: str | None = None,
        **engine: Any,
    ) -> None:
        check_sampling_source(generation_config, override_generation_config)
        paths = tokenizer, chat_template, allowed_local_media_path
        check_beside_settings(max_logprobs, tool_call_parser, reasoning_parser, paths)
        template = None if chat_template is None else read_template(chat_template)
        source = find_model(model)
        if model is None:
            check_embedded(source.path)
        engine |= {} if most_images(limit_mm_per_prompt) else {"image_cache_memory": 0}  # no tower
        config = engine_config(source.path, {"lora_modules": adapters_of(lora_modules), **engine})
        check_model(config, has_tokenizer=tokenizer is not None)
        from engine.startup.build import build_engine  # torch, seconds

        with StartupProgress() as startup, ExitStack() as undo:
            config = fetch_models(config, startup.report)
            built = build_engine(config, startup.report, begin_weights(config) if config.weights_cache else None)
            undo.callback(built.stop, 0.0)  # it may have processes and threads before it is started
            sampling = default_sampling(generation_config, override_generation_config, Path(config.model), logger)
            text = load_tokenizer(tokenizer or config.model, chat_template=template, sampling=sampling)
            text.hold_to(built.facts.vocab_size)
            check_draft_tokenizer(text, config.speculative_config)
            self._limits = ModelLimits.of(
                built.config,
                built.facts.vocab_size,
                text,
                max_logprobs=max_logprobs,
                generates=built.facts.generates,
                vectors=built.facts.vectors,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
            )
            wishes = mm_processor_kwargs, limit_mm_per_prompt, config.mmproj
            takes = built.facts.takes_images
            self._pictures = _pictures(Path(config.model), text, wishes, allowed_local_media_path) if takes else None
            undo.pop_all()
        self._engine, self._tokenizer, self._has_vocabulary = built, text, False  # the engine has none for grammars
        shown = None if self._pictures is None else self._pictures.preprocessor
        self._preprocessor = ChatPreprocessor(self._limits, images=shown)
        self._events, self._ids, self._turn = queue.SimpleQueue[StepEvents](), itertools.count(), threading.Lock()
        self._end = weakref.finalize(self, _end, built, text, self._pictures)
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

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing("LLM", name))

    @typed(InvalidRequestError)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        priority: Sequence[int] | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or token ids, and return results in order.

        `priority` has one value a prompt. vLLM's `use_tqdm` and `lora_request` are other names of `progress` and `lora`.
        Raises ClientError before anything runs, or the error of a request that fails. An error or Ctrl-C ends all
        requests of the call; the LLM can be used again.
        """
        progress, lora = refuse_arguments("generate", others, progress, lora)
        prompts = listed(prompts)
        each = for_each(sampling_params, len(prompts), priority)
        adapter = self._adapter(lora)
        makers = [partial(self._continuation, *one, adapter) for one in zip(prompts, each, strict=True)]
        return [job.output() for job in self._run(makers, progress)]

    @typed(InvalidRequestError)
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
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; like `generate` in everything else.

        The fields are those of /v1/chat/completions. An answer's text is without its thoughts and tool calls, and its
        `message` continues the conversation.
        """
        progress, lora = refuse_arguments("chat", others, progress, lora)
        given: list[Any] = list(messages)
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        for one in conversations:
            check_kind("messages", one, Messages)
        shared = {
            "tools": None if tools is None else [dict(tool) if isinstance(tool, Mapping) else tool for tool in tools],
            "tool_choice": dict(tool_choice) if isinstance(tool_choice, Mapping) else tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "reasoning_effort": reasoning_effort,
            "thinking_token_budget": thinking_token_budget,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }
        each, adapter = for_each(sampling_params, len(conversations)), self._adapter(lora)
        makers = [
            partial(self._reply, {**shared, "messages": list(map(with_addresses, one))}, own, adapter)
            for one, own in zip(conversations, each, strict=True)
        ]
        return [job.output() for job in self._run(makers, progress)]

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as one of transformers', as vLLM's method does."""
        return self._tokenizer.for_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the model recommends, as parameters to change and pass on."""
        known = self._tokenizer.sampling_defaults
        values = {name: getattr(known, name) for name in SamplingParams.model_fields if hasattr(known, name)}
        bounds = [bound for bound in (known.max_tokens, known.max_new_tokens) if bound is not None]
        return SamplingParams(**{**values, "max_tokens": min(bounds, default=16)})

    def _run(self, makers: Sequence[Callable[[], Job]], progress: bool) -> list[Job]:
        if not self._end.alive:
            raise ShuttingDownError("This LLM was closed; make a new one.")
        jobs = read_each(lambda make: make(), makers, "Prompt")
        with self._turn:  # one call at a time
            self._answer(jobs, show=progress)
        return jobs

    def _adapter(self, name: str | None) -> Adapter | None:
        loaded = None if name is None else self._engine.adapters.get(str(name))
        if name is not None and loaded is None:
            known = ", ".join(self._engine.adapters) or "none"
            raise InvalidRequestError(
                f"lora is {name!r}; of lora_modules there are: {known}. Load adapters with LLM(lora_modules={{name: folder}}).",
                param="lora",
            )
        return None if loaded is None else loaded.adapter

    def _continuation(self, prompt: Prompt, params: SamplingParams, adapter: Adapter | None) -> Job:
        """Return the job of a prompt. Raises ClientError."""
        limits, body = self._limits, params
        read, ids = self._read(prompt)
        ids = truncated(body, ids, limits, has_images=bool(read.spans))
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
        return self._job(read, ids, engine_params, text_rules(body, engine_params), body)

    def _read(self, prompt: Prompt) -> tuple[ReadPrompt, list[int]]:
        """Return a prompt, with the places of its images, and its ids. Raises ClientError."""
        read = read_prompt(prompt)
        text, ids = read.text, read.ids
        if ids is not None:
            self._limits.check_ids(ids, "prompt")
        elif read.images:
            pictures = self._seen("prompts")
            prepared = pictures.read(read.images, "prompts", read.cache_salt)
            ids = self._preprocessor.encode_text(text or "", prepared, add_special_tokens=True)
            read = read._replace(spans=pictures.preprocessor.spans(ids, prepared))
        else:
            assert text is not None, "a prompt has text or ids"
            self._limits.check_length(len(text), "prompt")
            ids = self._tokenizer.encode(text, add_special_tokens=True)
        if not ids:
            raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
        return read, ids

    def _seen(self, param: str) -> Pictures:
        """Return what reads images. Raises InvalidRequestError for a model of text alone."""
        if self._pictures is None:
            raise no_images(param)
        return self._pictures

    def _reply(self, conversation: Mapping[str, Any], params: SamplingParams, adapter: Adapter | None) -> Job:
        """Return the job of a conversation. Raises ClientError."""
        body = params.to_chat(conversation)
        self._limits.check_logprobs(params.logprobs, "logprobs")
        images = self._seen("messages").read(body.images, "messages") if body.images else ()
        chat = self._preprocessor.prepare(body, images=images)
        self._compile(chat.constraint)
        own, read = replace(chat.params, adapter=adapter), ReadPrompt(chat.text, None, "", body.images, chat.spans)
        return self._job(read, chat.prompt, own, chat.rules, body, turn_end=chat.turn_end)

    def _compile(self, constraint: Constraint | None) -> GrammarKey | None:
        """Return what names the grammar that a field asks for. Raises InvalidRequestError."""
        if constraint is None:
            return None
        if not self._has_vocabulary:
            source = self._tokenizer.vocabulary(self._engine.facts.vocab_size)
            self._engine.control(UseVocabulary(source, warms_up=False)).result()
            self._has_vocabulary = True
        self._engine.control(CompileGrammar(*constraint)).result()
        return GrammarKey(constraint.spec.digest)

    def _job(
        self,
        read: ReadPrompt,
        ids: Sequence[int],
        params: Params,
        rules: TextRules,
        body: QueueFields,
        turn_end: int = 0,
    ) -> Job:
        if dropped := body.dropped_hints(self._limits):
            logger.warning("without effect here: %s", ", ".join(dropped))
        request = Request(
            request_id=str(next(self._ids)),
            prompt=tuple(ids),
            params=params,
            arrival_s=0.0,
            priority=body.priority,
            cache_salt=read.cache_salt,
            deadline_s=body.deadline_ms and body.deadline_ms / 1e3,
            max_queue_s=body.max_queue_ms and body.max_queue_ms / 1e3,
            turn_end=turn_end,
            spans=read.spans,
        )
        check_request(request, self._engine.config)
        job = Job(read.text, request, rules, self._tokenizer, call_id_length=self._limits.call_id_length)
        job.images = read.images
        return job

    def _answer(self, jobs: Sequence[Job], *, show: bool) -> None:
        """Run jobs to their end, or abort them all."""
        waiting = deque(jobs)
        started: dict[str, Job] = {}
        most = 2 * self._engine.config.max_num_seqs  # so that the queue is never empty, and stays short
        num_tokens = 0
        try:
            with run_bars(show=show) as bar:
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
            if job.images and not job.request.images:
                prepared = self._seen("prompts").read(job.images, "prompts", job.request.cache_salt)
                job.request = replace(job.request, images=tuple([each.image for each in prepared]))
            try:
                self._engine.submit(replace(job.request, arrival_s=self._engine.clock()))
            except OverloadedError:
                if started:
                    return  # the queue is full of this call's requests; the next one that ends makes room
                time.sleep(_RETRY_S)  # an interrupted call's requests are about to leave the queue
                continue
            if job.images:
                job.request = replace(job.request, images=())
            started[job.request.request_id] = waiting.popleft()

    def _take(self, event: TokenEvent, started: dict[str, Job]) -> None:
        job = started.get(event.request_id)
        if job is None:
            return
        if job.accept(event):
            self._engine.abort(event.request_id, AbortCause.STOP_STRING, event.choice)
        if not job.num_open:
            del started[event.request_id]


def _pictures(model: Path, text: TextTokenizer, wishes: tuple[Any, ...], local: str | None) -> Pictures | None:
    """Return what makes images of a model's prompts, or None for a text model. Raises ConfigError."""
    from engine.llm.pictures import Pictures  # and transformers' part for images
    from engine.text.images.preprocessor import ImagePreprocessor

    preprocessor = ImagePreprocessor.of(model, text, *wishes)
    return None if preprocessor is None else Pictures(preprocessor, local)


def _end(engine: EngineHandle, tokenizer: TextTokenizer, pictures: Pictures | None) -> None:
    engine.stop(0.0)
    tokenizer.close()
    if pictures is not None:
        pictures.close()
