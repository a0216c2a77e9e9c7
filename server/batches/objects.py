"""Files and batches as JSON: OpenAI's objects, and a line of input. Pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from engine.text.fields.body import Refused, RequestBody, check_num_fields
from server.protocol.documents import CompletionTokensDetails, PageQuery

MAX_WINDOW_S = 30 * 24 * 3600
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}

Key = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Value = Annotated[str, StringConstraints(max_length=512)]


class Purpose(str, Enum):
    """The purpose of a file."""

    BATCH = "batch"  # the input of a batch, uploaded
    BATCH_OUTPUT = "batch_output"  # written by the server


class FileObject(BaseModel):
    """A file, without its content."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: Literal["file"] = Field("file", description="Which kind of object this is.")
    bytes: int = Field(description="The file's size.")
    created_at: int = Field(description="When it was made, in seconds since 1970.")
    filename: str = Field(description="As it was uploaded.")  # the client's name for it, under which nothing is opened
    purpose: Purpose = Field(description="As it was uploaded.")
    status: Literal["processed"] = Field("processed", description="How far it is.")


class BatchStatus(str, Enum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class LineError(BaseModel):
    """A fault in a batch's input."""

    code: str = Field(description="For programs; see the page of errors.")
    message: str = Field(description="A sentence for people.")
    param: str | None = Field(None, description="The field that is wrong.")
    line: int | None = Field(None, description="The line that is wrong.")  # of the file, from 1


class LineErrors(BaseModel):
    object: Literal["list"] = Field("list", description="Which kind of object this is.")
    data: list[LineError] = Field(description="The items.")


class RequestCounts(BaseModel):
    """Lines of a cancelled or expired batch that never ran are in neither count."""

    total: int = Field(0, description="All lines.")
    completed: int = Field(0, description="Lines with an answer.")
    failed: int = Field(0, description="Lines without one.")


class BatchTokensDetails(BaseModel):
    cached_tokens: int = Field(0, description="Tokens of the prompt whose K/V was found.")


class BatchUsage(BaseModel):
    """The usage of all completed lines."""

    input_tokens: int = Field(0, description="Tokens of the prompt.")
    input_tokens_details: BatchTokensDetails = Field(default_factory=BatchTokensDetails, description="What was cached.")
    output_tokens: int = Field(0, description="Tokens generated, reasoning included.")
    output_tokens_details: CompletionTokensDetails = Field(
        default_factory=lambda: CompletionTokensDetails(reasoning_tokens=0), description="What was reasoning."
    )
    total_tokens: int = Field(0, description="Both together.")

    def add(self, usage: dict[str, Any]) -> None:
        """Add an answer's usage, under any endpoint's names."""
        inputs = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        outputs = usage.get("completion_tokens", usage.get("output_tokens", 0))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        thoughts = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.input_tokens += inputs
        self.output_tokens += outputs
        self.total_tokens += inputs + outputs
        self.input_tokens_details.cached_tokens += details.get("cached_tokens", 0)
        self.output_tokens_details.reasoning_tokens += thoughts.get("reasoning_tokens", 0)


class Batch(BaseModel):
    """A batch as it is stored and shown. Times are Unix seconds."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: Literal["batch"] = Field("batch", description="Which kind of object this is.")
    endpoint: str = Field(description="As in the request.")
    model: str = Field(description="The model or adapter that answered.")
    input_file_id: str = Field(description="As in the request.")
    completion_window: str = Field(description="As in the request.")
    status: BatchStatus = Field(description="How far it is.")
    created_at: int = Field(description="When it was made, in seconds since 1970.")
    expires_at: int = Field(description="When lines that have not run expire.")
    in_progress_at: int | None = Field(None, description="When its first line could run.")
    finalizing_at: int | None = Field(None, description="When its last line had ended.")
    completed_at: int | None = Field(None, description="When it was complete.")
    failed_at: int | None = Field(None, description="When it was refused.")
    expired_at: int | None = Field(None, description="When it expired.")
    cancelling_at: int | None = Field(None, description="When it was asked to stop.")
    cancelled_at: int | None = Field(None, description="When it had stopped.")
    output_file_id: str | None = Field(None, description="The file of answers.")
    error_file_id: str | None = Field(None, description="The file of lines that did not run.")
    errors: LineErrors | None = Field(None, description="Why the batch was refused.")
    request_counts: RequestCounts = Field(
        default_factory=RequestCounts, description="How many lines there are, and have ended."
    )
    usage: BatchUsage = Field(default_factory=BatchUsage, description="How many tokens were read and generated.")
    metadata: dict[str, str] | None = Field(None, description="As in the request.")

    def move(self, status: BatchStatus, now: float) -> None:
        """Change the status and its time."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now))


class BatchBody(RequestBody):
    """The body of POST /v1/batches."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "output_expires_after": Refused(
            (), "files are kept until they are deleted; leave it out and DELETE /v1/files/{id}"
        )
    }

    input_file_id: str = Field(description="The uploaded file with one request a line.")
    endpoint: str = Field(description="The path that all requests of the batch have.")
    completion_window: str = Field(
        description="Lines that have not run by then expire: 24h, or a number of s, m, h or d up to 30d."
    )
    metadata: dict[Key, Value] | None = Field(
        None, max_length=16, description="Kept with the object; no effect on the answer."
    )

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if not 1 <= window_seconds(window) <= MAX_WINDOW_S:
            raise ValueError("give a whole number of s, m, h or d, at most 30d, such as 24h")
        return window


def window_seconds(window: str) -> int:
    """Return the seconds of a completion window; 0 if it is invalid."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    return int(match[1]) * _UNIT_S[match[2]] if match else 0


class BatchLine(BaseModel):
    """A line of a batch's input."""

    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        check_num_fields(data)
        return data


class FilesQuery(PageQuery):
    """The query of GET /v1/files."""

    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None
