"""The methods of LLM that read prompts and answer with numbers: embed, score, classify, rerank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.types import Adapter, Params, Pooling, PoolingParams
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
from engine.text.prompt_results import activated, unit_vector
from engine.text.requests.scoring import Compared, Reduction, plan_scores
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
    def _job(self, read: ReadPrompt, ids: Sequence[int], params: Params, rules: TextRules, body: QueueFields) -> Job:
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
        pairs = Compared([query], texts, ("query", "documents"), ("query", "document"))
        found = self._scored(pairs, truncate_prompt_tokens, lora, progress=progress)
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
        firsts, seconds = _texts("text_1", text_1), _texts("text_2", text_2)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequestError(
                f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; give one text_1, or as many as there are text_2.",
                param="text_1",
            )
        return self._scored(Compared(firsts, seconds), truncate_prompt_tokens, lora, reduction, progress=progress)

    def _scored(
        self, texts: Compared, most: int | None, lora: str | None, reduction: Reduction = "mean", *, progress: bool
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of texts. Raises ClientError."""
        reader = VectorReader(self._limits)
        plan = plan_scores(reader, texts, reader.truncation(most, None), reader.pooling("auto"), reduction=reduction)
        params = replace(plan.params, adapter=self._adapter(lora))
        makers = [partial(self._job, ReadPrompt(None, None), ids, params, _RULES, _IN_TURN) for ids in plan.prompts]
        jobs = self._run(makers, progress)
        scores = plan.scores([plan.shape(index, job.info()) for index, job in enumerate(jobs)])
        return [
            ScoringRequestOutput(
                request_id=jobs[parts[-1]].request.request_id,
                prompt_token_ids=[token for part in parts for token in jobs[part].request.prompt],
                outputs=ScoringOutput(score),
            )
            for parts, score in zip(plan.parts, scores, strict=True)
        ]

    def _pooled(self, pooling: str, lora: str | None) -> PoolingParams:
        check_choice("pooling", pooling, [each.value for each in Pooling], ("auto",))
        return PoolingParams(pooling=VectorReader(self._limits).pooling(pooling), adapter=self._adapter(lora))

    def _reading(self, prompt: Prompt, params: Params, truncation: Truncation = _WHOLE, before: str = "") -> Job:
        """Return the job of a prompt that is only read. Raises ClientError."""
        read = read_prompt(prompt)
        if read.images:
            read, ids = self._read(prompt)
            self._limits.check_readable(len(ids), "prompts")
        else:
            given = read.ids if read.ids is not None else read.text or ""
            ids = VectorReader(self._limits).read(given, "prompt", truncation, prompt=before)
        return self._job(read, ids, params, _RULES, _IN_TURN)


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """Return an argument's texts. Raises InvalidRequestError."""
    texts = [given] if isinstance(given, str) else list(given)
    if all(isinstance(text, str) for text in texts):
        return texts
    raise InvalidRequestError(f"{name} must be a text or a list of texts.", param=name)
