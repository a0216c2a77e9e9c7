"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.text.fields.body import Refused, RequestBody
from engine.text.fields.chat import Conversation, Message
from engine.text.tokenizer import token_text
from server.answers.body import UNSUPPORTED
from server.answers.model import aside
from server.answers.parts import InModel
from server.http.bodies import json_body
from server.http.openapi import answers
from server.http.threads import run_slowly
from server.protocol.documents import ResponseBody


class TokenizeBody(Conversation):
    """A `prompt` or `messages`. Special tokens are added to a prompt only."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {"chat_template": UNSUPPORTED["chat_template"]}

    model: str | None = Field(None, description="The served model or adapter; absent means the model of the daemon.")
    prompt: str | None = Field(None, description="A text, instead of messages.")
    messages: list[Message] = Field(default_factory=list, description="The conversation, oldest turn first.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens, such as BOS."
    )
    return_token_strs: bool = Field(False, description="Return each token's text too.")

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeBody:
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        return self


class Tokenized(ResponseBody):
    count: int = Field(description="The number of tokens.")
    max_model_len: int = Field(description="The longest prompt and answer together.")
    tokens: list[int] = Field(description="The token ids.")
    token_strs: list[str] | None = Field(None, description="Each token's text.")


class DetokenizeBody(RequestBody):
    model: str | None = Field(None, description="The served model or adapter; absent means the model of the daemon.")
    tokens: list[int] = Field(description="The token ids to turn into text.")


class Detokenized(ResponseBody):
    prompt: str = Field(description="The text.")


router = APIRouter()


MAX_INLINE_TOKENS = 2048  # about 2 ms; more are spelled on a worker thread


@router.post("/tokenize", responses=answers(Tokenized))
async def tokenize(
    http: Request,
    body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))],
    model: InModel,
) -> Response:
    """Return the token ids of a text or of a rendered conversation."""
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    if body.prompt is None:
        ids = await model.conversation_ids(http, body, add_special_tokens=special)
    else:
        [ids] = await model.encode([body.prompt], "prompt", add_special_tokens=special)

    def document() -> bytes:
        answer = Tokenized(count=len(ids), max_model_len=model.limits.max_model_len, tokens=ids)
        if body.return_token_strs:
            answer.token_strs = [token_text(model.tokenizer, token_id) for token_id in ids]
        return answer.json_bytes()

    made = document() if len(ids) <= MAX_INLINE_TOKENS else await run_slowly(document)
    return Response(made, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(model: InModel) -> dict[str, Any]:
    """Return what lm-eval needs to use the server's tokenizer."""
    limits = model.limits
    lengths = {"vocab_size": limits.vocab_size, "model_max_length": limits.max_model_len}
    return {"tokenizer_class": "TextTokenizer", "eos_token": None, **lengths, **model.tokenizer.description}


@router.post("/detokenize", responses=answers(Detokenized))
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))],
    model: InModel,
) -> Response:
    """Return the text of token ids, with special tokens spelled out."""

    def document() -> bytes:
        model.limits.check_ids(body.tokens, "tokens")
        return Detokenized(prompt=model.tokenizer.decode(body.tokens, skip_special_tokens=False)).json_bytes()

    return Response(await aside(document), media_type="application/json")
