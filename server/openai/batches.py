"""/v1/files and /v1/batches: requests that run while the engine is idle."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import uuid
from math import ceil
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Depends, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from engine.core.shown import shorten
from server.answers.parts import InModels, InOwner, InShared
from server.batches.dispatch import new_file_id
from server.batches.folder import NewFile
from server.batches.objects import (
    OPEN,
    Batch,
    BatchBody,
    BatchStatus,
    FileObject,
    FilesQuery,
    Purpose,
    window_seconds,
)
from server.batches.upload import Form
from server.batches.worker import BatchService
from server.http.bodies import json_body, limited
from server.protocol.documents import PageQuery
from server.protocol.errors import ApiError

FORM_BYTES = 16 * 1024  # of a form, beside its file
MAX_FILES = 10_000  # of an owner
MAX_OPEN_BATCHES = 100
ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank", "/v1/classify",
    "/pooling", "/v1/moderations",
)  # fmt: skip

router = APIRouter()


async def _batches(request: Request) -> BatchService:
    batches: BatchService | None = request.app.state.batches
    if batches is None:
        message = "Files and batches need a folder on disk; start the server with --data-dir FOLDER."
        raise ApiError(501, "not_enabled", message, type="not_implemented_error")
    return batches


InBatches = Annotated[BatchService, Depends(_batches)]


@router.post("/v1/batches")
async def create_batch(
    body: Annotated[BatchBody, Depends(json_body(BatchBody, loads=False))],
    models: InModels,
    batches: InBatches,
    owner: InOwner,
) -> Batch:
    """Create a batch that runs the requests of a file."""
    if body.endpoint not in ENDPOINTS:
        message = f"endpoint is {shorten(body.endpoint)!r}; batches are for {', '.join(ENDPOINTS)}."
        raise ApiError(400, "invalid_value", message, "endpoint")
    file = await batches.file(owner, body.input_file_id, "input_file_id")
    if file.purpose is not Purpose.BATCH:
        message = f"{file.id} is of purpose {file.purpose.value}; upload the input with purpose 'batch'."
        raise ApiError(400, "invalid_value", message, "input_file_id")
    if await batches.store(lambda store: store.num_open(owner)) >= MAX_OPEN_BATCHES:
        message = f"{MAX_OPEN_BATCHES} batches wait or run already; try again when one has ended."
        raise ApiError(429, "too_many_batches", message, type="rate_limit_error")
    now = time.time()
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        model=models.find(None).name,
        input_file_id=file.id,
        completion_window=body.completion_window,
        status=BatchStatus.VALIDATING,
        created_at=int(now),
        expires_at=ceil(now) + window_seconds(body.completion_window),
        metadata=body.metadata,
    )
    if not await batches.store(lambda store: store.add_batch(owner, batch)):
        raise ApiError(404, "file_not_found", f"The file {file.id} has just been deleted.", "input_file_id")
    batches.worker.wake()
    return batch


@router.get("/v1/batches")
async def list_batches(http: Request, batches: InBatches, owner: InOwner) -> dict[str, Any]:
    """List the owner's batches, newest first."""
    asked = PageQuery.model_validate(dict(http.query_params))
    if asked.after is not None:
        await batches.batch(owner, asked.after, "after")
    found = await batches.store(lambda store: store.batches(owner, asked.after, asked.limit + 1))
    return asked.page([each.model_dump(mode="json") for each in found])


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batches: InBatches, owner: InOwner, batch_id: str) -> Batch:
    """Return a batch."""
    return await batches.batch(owner, batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batches: InBatches, owner: InOwner, batch_id: str) -> Batch:
    """Cancel a batch."""

    def change(batch: Batch) -> None:
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            batch.move(BatchStatus.CANCELLING, time.time())

    batch = await batches.batch(owner, batch_id)
    if batch.status not in OPEN:
        message = f"The batch is {batch.status.value} already; only one that has not ended can be cancelled."
        raise ApiError(409, "batch_ended", message, "batch_id")
    batch = await batches.store(lambda store: store.update(batch_id, change))
    batches.worker.wake()
    return batch


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_file(http: Request, config: InShared, batches: InBatches, owner: InOwner) -> FileObject:
    """Upload a file, as a multipart form."""
    most = config.max_file_bytes
    stream = limited(http, most + FORM_BYTES, f"The file is larger than {most} bytes; split it (--max-file-bytes).")
    if await batches.store(lambda store: store.num_files(owner)) >= MAX_FILES:
        message = f"{MAX_FILES} files are kept here already; delete some with DELETE /v1/files/{{id}}."
        raise ApiError(429, "too_many_files", message, type="rate_limit_error")
    file_id = new_file_id()
    new = NewFile(batches.folder.path_of(file_id))
    with new:
        form = Form(http.headers.get("content-type", ""), new)
        filename = await form.read(stream)
        _check_form(form, new.num_bytes)
        await asyncio.to_thread(new.keep)
    file = FileObject(
        id=file_id, bytes=new.num_bytes, created_at=int(time.time()), filename=filename, purpose=Purpose.BATCH
    )
    try:
        await batches.store(lambda store: store.add_file(owner, file))
    except sqlite3.Error:
        batches.folder.path_of(file_id).unlink()
        raise
    return file


def _check_form(form: Form, num_bytes: int) -> None:
    purpose = form.fields.pop("purpose", None)
    if purpose != Purpose.BATCH.value:
        message = "purpose: Field required" if purpose is None else f"purpose is {shorten(purpose)!r}"
        raise ApiError(400, "invalid_value", f"{message}; files here are for batches: give 'batch'.", "purpose")
    if form.fields:
        unknown = min(form.fields)
        message = f"{shorten(unknown)} is not supported: files are kept until they are deleted; leave it out."
        raise ApiError(400, "unsupported_parameter", message, unknown)
    if not num_bytes:
        raise ApiError(400, "invalid_value", "The file is empty; put one request on each line.", "file")


@router.get("/v1/files")
async def list_files(http: Request, batches: InBatches, owner: InOwner) -> dict[str, Any]:
    """List the owner's files."""
    asked = FilesQuery.model_validate(dict(http.query_params))
    if asked.after is not None:
        await batches.file(owner, asked.after, "after")
    is_descending = asked.order == "desc"
    found = await batches.store(
        lambda store: store.files(owner, asked.after, asked.limit + 1, asked.purpose, newest_first=is_descending)
    )
    return asked.page([each.model_dump(mode="json") for each in found])


@router.get("/v1/files/{file_id}")
async def retrieve_file(batches: InBatches, owner: InOwner, file_id: str) -> FileObject:
    """Return a file's properties."""
    return await batches.file(owner, file_id)


class OpenFile(FileResponse):
    """Sends an open file whole, whether it is deleted meanwhile or not."""

    def __init__(self, file: BinaryIO) -> None:
        headers, number = {"x-content-type-options": "nosniff"}, file.fileno()
        super().__init__(
            f"/dev/fd/{number}", media_type="application/octet-stream", headers=headers, stat_result=os.fstat(number)
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def retrieve_file_content(batches: InBatches, owner: InOwner, file_id: str) -> Response:
    """Return a file's content."""
    path = batches.folder.path_of((await batches.file(owner, file_id)).id)
    try:
        return OpenFile(await asyncio.to_thread(path.open, "rb"))
    except FileNotFoundError as error:
        message = "The file is being deleted, or its deletion was cut short, and its content is gone."
        raise ApiError(404, "file_not_found", message, "file_id") from error


@router.delete("/v1/files/{file_id}")
async def delete_file(batches: InBatches, owner: InOwner, file_id: str) -> dict[str, Any]:
    """Delete a file."""
    path = batches.folder.path_of((await batches.file(owner, file_id)).id)
    reader = await batches.store(lambda store: store.delete_file(owner, file_id, path))
    if reader is not None:
        message = f"The file is the input of {reader}, which has not ended; cancel that first."
        raise ApiError(409, "file_in_use", message, "file_id")
    return {"id": file_id, "object": "file", "deleted": True}
