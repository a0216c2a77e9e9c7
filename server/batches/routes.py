"""/v1/files and /v1/batches: requests that run while the engine is idle."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import FileResponse, Response

from server.batches.objects import BatchBody, FilesQuery, PageQuery, page
from server.context import InContext, InOwner, json_body
from server.http.bodies import limited

FORM_BYTES = 16 * 1024  # of a form, beside its file

router = APIRouter()


@router.post("/v1/batches")
async def create_batch(
    context: InContext, owner: InOwner, body: Annotated[BatchBody, Depends(json_body(BatchBody))]
) -> dict[str, Any]:
    """Create a batch that runs the requests of a file."""
    batch = await context.batch_service().create(owner, body, context.config.served_model_names[0])
    return batch.model_dump(mode="json")


@router.get("/v1/batches")
async def list_batches(http: Request, context: InContext, owner: InOwner) -> dict[str, Any]:
    """List the owner's batches, newest first."""
    asked = PageQuery.model_validate(dict(http.query_params))
    batches = await context.batch_service().batches(owner, asked.after, asked.limit + 1)
    return page(batches[: asked.limit], has_more=len(batches) > asked.limit)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(context: InContext, owner: InOwner, batch_id: str) -> dict[str, Any]:
    """Return a batch."""
    return (await context.batch_service().batch(owner, batch_id)).model_dump(mode="json")


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(context: InContext, owner: InOwner, batch_id: str) -> dict[str, Any]:
    """Cancel a batch."""
    return (await context.batch_service().cancel(owner, batch_id)).model_dump(mode="json")


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_file(http: Request, context: InContext, owner: InOwner) -> Response:
    """Upload a file, as a multipart form."""
    most = context.config.max_file_bytes
    message = f"The file is larger than {most} bytes; split it (--max-file-bytes)."
    stream = limited(http, most + FORM_BYTES, message)
    file = await context.batch_service().upload(owner, http.headers.get("content-type", ""), stream)
    return Response(file.model_dump_json(), media_type="application/json")


@router.get("/v1/files")
async def list_files(http: Request, context: InContext, owner: InOwner) -> dict[str, Any]:
    """List the owner's files."""
    asked = FilesQuery.model_validate(dict(http.query_params))
    is_descending = asked.order == "desc"
    files = await context.batch_service().files(
        owner, asked.after, asked.limit + 1, asked.purpose, newest_first=is_descending
    )
    return page(files[: asked.limit], has_more=len(files) > asked.limit)


@router.get("/v1/files/{file_id}")
async def retrieve_file(context: InContext, owner: InOwner, file_id: str) -> dict[str, Any]:
    """Return a file's properties."""
    return (await context.batch_service().file(owner, file_id)).model_dump(mode="json")


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def retrieve_file_content(context: InContext, owner: InOwner, file_id: str) -> Response:
    """Return a file's content."""
    path = await context.batch_service().content(owner, file_id)
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(context: InContext, owner: InOwner, file_id: str) -> dict[str, Any]:
    """Delete a file."""
    await context.batch_service().delete(owner, file_id)
    return {"id": file_id, "object": "file", "deleted": True}
