"""The methods of LLM that read prompts and answer with numbers: embed, score, classify, rerank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.types import Adapter, Pooling
from engine.core.types import SamplingParams as EngineParams
from engine.llm.arguments import check_choice, typed
from engine.llm.job import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Job,
    RankedDocument,
    ScoringOutput,
    ScoringRequestOutput,
)
from engine.llm.prompts import Prompt, ReadPrompt, listed, read_prompt
from engine.llm.unserved import refuse_arguments
from engine.text.chat.choice import TextRules
from engine.text.chat.limits import ModelLimits
from engine.text.fields.sampling import QueueFields
from engine.text.prompt_results import (
    Reduction,
    activated,
    check_likelihoods,
    check_reduction,
    cosine,
    first_scored,
    likelihood,
    unit_vector,
)
from engine.text.requests.vector_reader import Truncation, VectorReader

_Make = Callable[[], Job]
_WHOLE = Truncation()
_RULES, _IN_TURN = TextRules(), QueueFields()


class VectorMethods(ABC):
    """What LLM inherits; LLM has what is abstract here."""

    _limits: ModelLimits

    @abstractmethod
    def _run(self, makers: Sequence[_Make], progress: bool) -> list[Job]:
        """Run jobs to their end."""

    @abstractmethod
    def _adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name."""

    @abstractmethod
    def _read(self, prompt: Prompt) -> tuple[ReadPrompt, list[int]]:
        """Return a prompt and its tokens."""

    @abstractmethod
    def _job(
        self, read: ReadPrompt, ids: Sequence[int], params: EngineParams, rules: TextRules, body: QueueFields
    ) -> Job:
        """Return the job of a prompt."""

    @typed(InvalidRequestError)
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "auto",
        dimensions: int | None = None,
        input_type: str | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return each prompt's vector, as /v1/embeddings does; `pooling` is "auto", "last", "mean" or "cls"."""
        progress, lora = refuse_arguments("embed", others, progress, lora)
        reader = VectorReader(self._limits)
        reader.require_vectors()
        params, prompt = self._pooled(pooling, lora), reader.prompt(input_type)
        truncation = reader.truncation(truncate_prompt_tokens, None)
        jobs = self._run([partial(self._reading, one, params, truncation, prompt) for one in listed(prompts)], progress)
        wanted = reader.normalizes(normalize, dimensions)
        vectors = [unit_vector(job.info().pooled or (), dimensions, normalizes=wanted) for job in jobs]
        return [
            EmbeddingRequestOutput(
                request_id=job.request.request_id,
                prompt_token_ids=list(job.request.prompt),
                outputs=EmbeddingOutput(vector.tolist()),
            )
            for job, vector in zip(jobs, vectors, strict=True)
        ]

    @typed(InvalidRequestError)
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora: str | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the scores of a classifier's labels for each prompt, as /v1/classify does."""
        progress, lora = refuse_arguments("classify", others, progress, lora)
        reader = VectorReader(self._limits)
        reader.require_labels()
        params, truncation = self._pooled("auto", lora), reader.truncation(truncate_prompt_tokens, None)
        jobs = self._run([partial(self._reading, one, params, truncation) for one in listed(prompts)], progress)
        activation = reader.settings.activation if use_activation else ""
        return [
            ClassificationRequestOutput(
                request_id=job.request.request_id,
                prompt_token_ids=list(job.request.prompt),
                outputs=ClassificationOutput(activated(job.info().pooled or (), activation)),
            )
            for job in jobs
        ]

    @typed(InvalidRequestError)
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[RankedDocument]:
        """Return the documents that answer a query best, the best first, as /v1/rerank does."""
        progress, lora = refuse_arguments("rerank", others, progress, lora)
        if top_n is not None and top_n < 1:
            raise InvalidRequestError(f"top_n is {top_n}; give 1 at least.", param="top_n")
        VectorReader(self._limits).require_relevance()
        texts = _texts("documents", documents)
        if not texts:
            raise InvalidRequestError("There are no documents; give at least one.", param="documents")
        types = "query", "document"
        found = self._matches([query], texts, truncate_prompt_tokens, lora, types, progress=progress)
        ranked = [RankedDocument(index, each.outputs.score, texts[index]) for index, each in enumerate(found)]
        return sorted(ranked, key=lambda each: -each.score)[:top_n]

    @typed(InvalidRequestError)
    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        reduction: Reduction = "mean",
        truncate_prompt_tokens: int | None = None,
        lora: str | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text_2 matches its text_1, or its likelihood behind that, as /v1/score does."""
        progress, lora = refuse_arguments("score", others, progress, lora)
        check_choice("reduction", reduction, ("mean", "sum"), ())
        firsts, seconds_ = _texts("text_1", text_1), _texts("text_2", text_2)
        if len(firsts) not in (1, len(seconds_)):
            raise InvalidRequestError(
                f"text_1 has {len(firsts)} texts and text_2 {len(seconds_)}; give one text_1, or as many as there are "
                "text_2.",
                param="text_1",
            )
        if not self._limits.generates:
            check_reduction(reduction)
            return self._matches(firsts, seconds_, truncate_prompt_tokens, lora, (None, None), progress=progress)
        check_likelihoods(seconds_, truncate_prompt_tokens)
        firsts *= len(seconds_) if len(firsts) == 1 else 1
        params = EngineParams(max_tokens=0, prompt_logprobs=0, adapter=self._adapter(lora))
        wholes = [first + second for first, second in zip(firsts, seconds_, strict=True)]
        jobs = self._run([partial(self._reading, whole, params) for whole in wholes], progress)
        contexts = [self._limits.tokenizer.encode(text, add_special_tokens=True) for text in firsts]
        return [
            _scored(likelihood(job.info().logprobs or (), first_scored(context, job.request.prompt), reduction), job)
            for job, context in zip(jobs, contexts, strict=True)
        ]

    def _matches(
        self,
        firsts: Sequence[str],
        seconds_: Sequence[str],
        most: int | None,
        lora: str | None,
        types: tuple[str | None, str | None],
        *,
        progress: bool,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs by a classifier, or the cosines of an embedder's vectors."""
        reader, params = VectorReader(self._limits), self._pooled("auto", lora)
        truncation, makers = reader.truncation(most, None), list[_Make]()
        if reader.settings.labels:
            reader.require_one_label()
            activation = reader.settings.pair_activation
            pairs = zip(list(firsts) * (len(seconds_) if len(firsts) == 1 else 1), seconds_, strict=True)
            names = ("query", "documents") if types[0] else ("text_1", "text_2")
            jobs = self._run([partial(self._pair, *pair, names, params, truncation) for pair in pairs], progress)
            return [_scored(activated(job.info().pooled or (0.0,), activation)[0], job) for job in jobs]
        for texts, prompt in zip((firsts, seconds_), map(reader.prompt, types), strict=True):
            makers += [partial(self._reading, text, params, truncation, prompt) for text in texts]
        jobs = self._run(makers, progress)
        vectors = [unit_vector(job.info().pooled or ()) for job in jobs]
        one, others = jobs[: len(firsts)], jobs[len(firsts) :]
        places = range(len(firsts)) if len(firsts) > 1 else [0] * len(seconds_)
        return [
            _scored(cosine(vectors[place], vector), one[place], job)
            for place, vector, job in zip(places, vectors[len(firsts) :], others, strict=True)
        ]

    def _pooled(self, pooling: str, lora: str | None) -> EngineParams:
        check_choice("pooling", pooling, [each.value for each in Pooling], ("auto",))
        kind = VectorReader(self._limits).pooling(pooling)
        return EngineParams(max_tokens=0, pooling=kind, adapter=self._adapter(lora))

    def _reading(self, prompt: Prompt, params: EngineParams, truncation: Truncation = _WHOLE, before: str = "") -> Job:
        """Return the job of a prompt that is only read. Raises ClientError."""
        read, reader = read_prompt(prompt), VectorReader(self._limits)
        if read.images:
            read, ids = self._read(prompt)
        elif read.ids is None:
            ids = reader.text(read.text or "", "prompt", truncation, prompt=before)
        else:
            self._limits.check_ids(read.ids, "prompt")
            ids = truncation.cut(read.ids)
        if not ids:
            raise InvalidRequestError("The prompt has no tokens; give at least one.", param="prompt")
        self._limits.check_readable(len(ids), "prompts")
        return self._job(read, ids, params, _RULES, _IN_TURN)

    def _pair(
        self, first: str, second: str, names: tuple[str, str], params: EngineParams, truncation: Truncation
    ) -> Job:
        ids = VectorReader(self._limits).pair(first, second, names, truncation)
        return self._job(read_prompt(first), ids, params, _RULES, _IN_TURN)


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """Return an argument's texts. Raises InvalidRequestError."""
    texts = [given] if isinstance(given, str) else list(given)
    if all(isinstance(text, str) for text in texts):
        return texts
    raise InvalidRequestError(f"{name} must be a text or a list of texts.", param=name)


def _scored(score: float, *jobs: Job) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=jobs[-1].request.request_id,
        prompt_token_ids=[token for job in jobs for token in job.request.prompt],
        outputs=ScoringOutput(score),
    )
