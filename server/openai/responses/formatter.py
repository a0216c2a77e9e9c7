"""The formatter of /v1/responses: a document, or numbered events. Pure data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.types import FinishReason, SamplingParams
from engine.text.choice import Delta
from server.errors import ApiError
from server.openai.formatter import ChunkMeta, frame
from server.openai.responses.body import ResponsesBody
from server.openai.responses.output import (
    IncompleteDetails,
    OutputWriter,
    ResponseDocument,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from server.openai.usage import Usage
from server.telemetry.timeline import AnswerMetrics


class ResponsesFormatter:
    """Implements ResponseFormatter for /v1/responses.

    `keep`, if the response is stored, is called with the document of a successful answer.
    """

    def __init__(
        self,
        body: ResponsesBody,
        meta: ChunkMeta,
        params: SamplingParams,
        writer: OutputWriter,
        keep: Callable[[bytes], None] | None,
    ) -> None:
        self._writer = writer
        self._keep = keep
        self._num_events = 0
        self._finish_reason: FinishReason | None = None
        self._fields: dict[str, Any] = {
            "id": f"{meta.id_prefix}_{meta.answer_id}",
            "object": "response",
            "created_at": meta.created,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": meta.model,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": keep is not None,
            "temperature": params.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice.document(),
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        self._add(deltas[0])
        self._writer.finish(self._finish_reason)
        return self._conclude(usage)[1].json_bytes()

    def opening(self) -> bytes:
        begun = self._document("in_progress")
        return b"".join(
            self._frame(ResponseEvent(type=f"response.{name}", response=begun)) for name in ("created", "in_progress")
        )

    def news(self, news: Sequence[tuple[int, Delta]], usage: Callable[[], Usage]) -> bytes:  # noqa: ARG002 - at the end
        return b"".join([self._frame(event) for _, delta in news for event in self._add(delta)])

    def closing(self, usage: Usage, metrics: AnswerMetrics | None) -> bytes:  # noqa: ARG002 - of chat
        last = [self._frame(event) for event in self._writer.finish(self._finish_reason)]
        status, document = self._conclude(usage)
        return b"".join([*last, self._frame(ResponseEvent(type=f"response.{status}", response=document))])

    def failure(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = ResponseError(code=code, message=error.message)
        document = self._document("failed", output=self._writer.items, error=failed)
        return self._frame(ResponseEvent(type="response.failed", response=document))

    def _add(self, delta: Delta) -> list[ResponseEvent]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        return self._writer.add(delta)

    def _conclude(self, usage: Usage) -> tuple[str, ResponseDocument]:
        """Return the final status and the whole answer, after keeping it."""
        fields: dict[str, Any] = {"output": self._writer.items, "usage": ResponseUsage.of(usage)}
        if self._finish_reason is FinishReason.LENGTH:
            status = "incomplete"
            fields["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
        else:
            status = "completed"
            fields["completed_at"] = int(time.time())
        document = self._document(status, **fields)
        if self._keep is not None:
            self._keep(document.json_bytes())
        return status, document

    def _document(self, status: str, **fields: Any) -> ResponseDocument:
        given = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None, "output": []} | fields
        return ResponseDocument(**self._fields, status=status, **given)

    def _frame(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return frame(event.json_bytes(), event.type)
