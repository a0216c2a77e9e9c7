"""The page of error codes."""

from __future__ import annotations

from tests.reference.tables import MADE, table

_HEAD = f"""# Errors

{MADE}

`code` is for programs and stays the same between versions; `message` is for people. `param` names the field, or is null.

```json
{{"error": {{"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": "context_length_exceeded"}}}}
```

Under `/v1/messages`, and `/v1/models` where `anthropic-version` is sent, errors have Anthropic's shape:
`{{"type": "error", "error": {{"type": ..., "message": ...}}, "request_id": ...}}`. In an open stream an error is its last event:
of chats and completions followed by `[DONE]`, of messages `error`, of responses `response.failed`.
"""

# Code -> (status, when, what to do). test_reference.py holds this table to the codes in the code.
ERRORS = {
    "invalid_value": (400, "A value is out of its range, or two fields exclude each other.", "The message has the range."),
    "invalid_type": (400, "A value has the wrong type.", "The message has the type."),
    "missing_required_parameter": (400, "A required field is absent.", "Send it."),
    "unknown_parameter": (400, "A field is unknown, or a hint cannot be followed, under `--strict-fields`.", "Leave it out."),
    "unsupported_parameter": (400, "Ignoring the field would make the answer wrong.", "The message has the alternative."),
    "invalid_json": (400, "The body is not JSON.", "The message has the position."),
    "too_many_values": (400, "The body has more values than `--max-json-values`.", "Send less."),
    "unsupported_media_type": (400, "The body's type or encoding is not read.", "Send `application/json`, unencoded."),
    "invalid_multipart": (400, "The form of a file cannot be read.", "Send one file, and all of it."),
    "invalid_header": (400, "A header is there twice.", "Send it once."),
    "invalid_host": (400, "The Host header is not a host and a port.", "Check the client or the proxy."),
    "invalid_http": (400, "This is not HTTP/1.1.", "Check the client or the proxy."),
    "context_length_exceeded": (400, "Prompt and answer are longer than `--max-model-len`.", "Shorten the prompt, or lower max_tokens."),
    "request_too_large": (400, "The request can never fit the KV pool. As a 413: the body is too large.", "Send less."),
    "invalid_api_key": (401, "The key is missing or wrong.", "Send `Authorization: Bearer KEY`."),
    "host_not_allowed": (403, "The Host header's name is not allowed.", "Set `--allowed-hosts`, or a key."),
    "origin_not_allowed": (403, "A web page of another origin sent the request.", "Set `--allowed-origins`."),
    "not_allowed": (403, "The key is not the operator's.", "Use a key of `--api-key`."),
    "not_found": (404, "There is no such route.", "The message has the alternative of routes that other servers have."),
    "model_not_found": (404, "No model or adapter has this name.", "The message lists the names."),
    "peer_not_allowed": (400, "kv_transfer_params names an address that peers of --kv-transfer-config do not have.", "Add it there."),
    "adapter_not_found": (404, "No adapter has this name, or no folder is there.", "Load it first."),
    "request_not_found": (404, "The request ended too long ago, or belongs to another account.", ""),
    "response_not_found": (404, "The response is not stored any more, or belongs to another account.", "Send the whole conversation."),
    "previous_response_not_found": (404, "The response to continue is not stored any more.", "Send the whole conversation."),
    "item_not_found": (404, "The item named by `after` is not in the list, or one of `input` is not stored.", ""),
    "file_not_found": (404, "There is no such file in this account.", ""),
    "batch_not_found": (404, "There is no such batch in this account.", ""),
    "method_not_allowed": (405, "The route has another method.", "The message has it."),
    "deadline_unreachable": (408, "`deadline_ms` or `max_queue_ms` cannot be met.", "Do not retry; add capacity."),
    "request_timeout": (408, "The rest of the request did not arrive, or too slowly.", "Send it again, faster."),
    "adapter_conflict": (409, "The adapter's name is taken, or `--max-loras` are loaded.", "Unload one."),
    "batch_ended": (409, "The batch has ended already.", ""),
    "file_in_use": (409, "An open batch reads the file.", "Cancel the batch first."),
    "rate_limit_exceeded": (429, "The queue is full, or a tenant is over its limit.", "Wait for `Retry-After`."),
    "too_many_batches": (429, "The account has too many open batches.", "Wait for one to end."),
    "too_many_files": (429, "The account has too many files.", "Delete some."),
    "headers_too_large": (431, "The headers are too large.", "Send fewer."),
    "client_disconnected": (499, "The client left; only the log shows it.", ""),
    "internal_error": (500, "The server failed.", "Its log says why; please report it."),
    "compute_error": (500, "The model's numbers for this request are not finite.", "Check the checkpoint and `--dtype`."),
    "model_failed": (503, "The request's model could not be loaded.", "The message has the reason; it is tried again after 30 s."),
    "model_loading": (503, "The model is being loaded.", "Wait for `Retry-After`."),
    "model_not_loaded": (503, "The model is not loaded, and this request does not load it.", "POST /v1/models/NAME/load."),
    "not_enabled": (501, "The feature is off.", "The message has the flag."),
    "engine_dead": (503, "The model's engine has ended.", "The message and the log have the cause; load the model again, or restart the daemon."),
    "guard_unavailable": (503, "The guard cannot judge a text, so it is not shown.", "Try again; see the guard's `/health?model=NAME`."),
    "shutting_down": (503, "The daemon drains.", "Ask another replica, or wait for `Retry-After`."),
    "engine_busy": (503, "A snapshot took too long.", "Try again."),
    "body_not_read": (503, "A large body could not be read in time.", "Try again, or send less."),
    "insufficient_storage": (507, "The disk of `--data-dir` is full.", "Delete files."),
}  # fmt: skip


def errors_page() -> str:
    """Return the page."""
    rows = ((str(status), f"`{code}`", when, then) for code, (status, when, then) in ERRORS.items())
    return "\n".join([_HEAD, *table(("status", "code", "when", "what to do"), rows)])
