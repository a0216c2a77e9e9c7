"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer alone, without the engine."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.http.slow_thread import run_slowly
from server.protocol.logprobs import token_text
from server.protocol.tokens import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from server.routes.context import InContext, aside, json_body
from server.routes.openapi import answers

router = APIRouter()


MAX_INLINE_TOKENS = 2048  # about 2 ms; more are spelled on a worker thread, so that other requests are not held up


@router.post("/tokenize", responses=answers(Tokenized))
async def tokenize(context: InContext, body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))]) -> Response:
    """The token ids of a text or of a rendered conversation."""
    context.check_model(body.model)
    text = await context.render(body) if body.prompt is None else body.prompt
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    param = "messages" if body.prompt is None else "prompt"
    [ids] = await context.encode([text], param, add_special_tokens=special)

    def document() -> bytes:
        answer = Tokenized(count=len(ids), max_model_len=context.limits.max_model_len, tokens=ids)
        if body.return_token_strs:
            answer.token_strs = [token_text(context.tokenizer, token_id) for token_id in ids]
        return answer.json_bytes()

    made = document() if len(ids) <= MAX_INLINE_TOKENS else await run_slowly(document)
    return Response(made, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(context: InContext) -> dict[str, Any]:
    """What lm-eval asks to work with the server's tokenizer instead of one of its own."""
    limits = context.limits
    lengths = {"vocab_size": limits.vocab_size, "model_max_length": limits.max_model_len}
    return {"tokenizer_class": "TextTokenizer", "eos_token": None, **lengths, **context.tokenizer.description}


@router.post("/detokenize", responses=answers(Detokenized))
async def detokenize(
    context: InContext, body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))]
) -> Response:
    """The text of some token ids, special tokens spelled out."""
    context.check_model(body.model)

    def document() -> bytes:
        context.limits.check_ids(body.tokens, "tokens")
        return Detokenized(prompt=context.tokenizer.decode(body.tokens, skip_special_tokens=False)).json_bytes()

    return Response(await aside(document), media_type="application/json")
