"""Routes of other servers that Quire does not have: a 404 with an alternative."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from server.protocol.errors import ApiError

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_AUDIO = "Quire serves text models and has no audio; use a speech server, and send its text to /v1/chat/completions."
_IMAGES = "Quire serves text models and makes no images or videos; use a server for image models."
_RERANK = "Quire has no rerank models; compare vectors of /v1/embeddings, or likelihoods of /v1/score."
_POOLING = "Quire has no classifiers or reward models; for a text's vector use /v1/embeddings."
_MODERATION = "Quire has no moderation model; ask the served one through /v1/chat/completions, with a response_format for verdicts."
_ASSISTANTS = "Quire has no assistants and no vector stores; use /v1/responses, which keeps a conversation by its id."
_OLLAMA = "Quire does not speak Ollama's API; point the client's OpenAI mode at /v1."
_COMPLETION = "Quire does not have this route; use /v1/completions or /v1/chat/completions."
_SLEEP = "The weights stay on the device; stop the daemon to free it, a start takes seconds."
_CACHE = "The prefix cache is not emptied by a request; send another cache_salt, requests with different salts share nothing."
_PROFILE = "Profiles are not taken by a request; --otlp-traces-endpoint shows where a request's time goes."
_WORKERS = "One process serves and computes; there are no workers to call or to add."
_RENDER = (
    "Quire does not have this route; /tokenize returns the tokens of messages, and completions take them as the prompt."
)

UNSERVED = {  # each with all paths below it
    "/v1/audio": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images": _IMAGES,
    "/v1/videos": _IMAGES,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/pooling": _POOLING,
    "/v1/pooling": _POOLING,
    "/classify": _POOLING,
    "/v1/classify": _POOLING,
    "/v1/moderations": _MODERATION,
    "/v1/assistants": _ASSISTANTS,
    "/v1/threads": _ASSISTANTS,
    "/v1/vector_stores": _ASSISTANTS,
    "/v1/fine_tuning": "Quire serves models and does not train them; LoRA adapters are loaded with --lora-modules.",
    "/v1/uploads": "Quire takes files in one piece; use POST /v1/files.",
    "/v1/messages/batches": "Quire has batches in OpenAI's form; use /v1/files and /v1/batches.",
    "/api": _OLLAMA,
    "/generate": _COMPLETION,
    "/completion": _COMPLETION,
    "/invocations": _COMPLETION,
    "/inference/v1/generate": _COMPLETION,
    "/v1/completions/render": _RENDER,
    "/v1/chat/completions/render": _RENDER,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/pause": "Requests are not paused; a client that closes its connection ends its own.",
    "/resume": "Requests are not paused; a client that closes its connection ends its own.",
    "/abort_requests": "A client that closes its connection ends its own requests.",
    "/reset_prefix_cache": _CACHE,
    "/reset_mm_cache": "Prompts are text, and there is no cache of images.",
    "/reset_encoder_cache": "Prompts are text, and there is no cache of images.",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/collective_rpc": _WORKERS,
    "/scale_elastic_ep": _WORKERS,
    "/is_scaling_elastic_ep": _WORKERS,
    "/ping": "Quire does not have this route; use /health, or /ready.",
}

router = APIRouter()


def _add(path: str, message: str) -> None:
    async def refuse() -> Response:
        raise ApiError(404, "not_found", message)

    for each in (path, path + "/{rest:path}"):
        router.add_api_route(each, refuse, methods=_METHODS, include_in_schema=False)


for _path, _message in UNSERVED.items():
    _add(_path, _message)
