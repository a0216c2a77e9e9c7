"""The page of headers."""

from __future__ import annotations

from tests.reference.tables import MADE, table

# Header -> meaning. test_reference.py holds both tables to the names in the code.
REQUEST = {
    "authorization": "`Bearer KEY`: the API key, if the daemon has one.",
    "x-api-key": "The API key, as Anthropic's clients send it.",
    "x-request-id": "A name for the request, in the answer, the log and `/v1/requests/{id}`; one is made if it is absent.",
    "host": "Checked where no key is set: see --allowed-hosts.",
    "origin": "Checked for POST and DELETE: see --allowed-origins.",
    "content-type": "`application/json`; `multipart/form-data` for files.",
    "content-encoding": "Only `identity`.",
    "anthropic-version": "Errors of `/v1/models` have Anthropic's shape; no effect on other paths.",
    "traceparent": "The caller's trace; the request's spans join it, if traces are on.",
    "tracestate": "Travels with the trace.",
}
RESPONSE = {
    "x-request-id": "The request's name.",
    "request-id": "The same, under `/v1/messages`, and under `/v1/models` where `anthropic-version` was sent.",
    "x-quire-ignored-fields": "Fields of the request that were dropped, by name; of more than 20 the rest are counted.",
    "server-timing": "queue, prefill and decode in milliseconds, cached tokens, preemptions; not for streams.",
    "retry-after": "With 429 and 503: seconds until another try is worthwhile.",
    "retry-after-ms": "The same in milliseconds.",
    "x-should-retry": "`false` with a 408: a retry would be later than the client wants.",
    "x-ratelimit-limit-requests": "The tenant's limit of open requests.",
    "x-ratelimit-remaining-requests": "How many more the tenant may open now.",
    "x-ratelimit-limit-tokens": "The tenant's tokens a minute.",
    "x-ratelimit-remaining-tokens": "Tokens that the tenant has left now.",
    "x-ratelimit-reset-tokens": "The time until the whole limit is there again.",
}


def headers_page() -> str:
    """Return the page."""
    lines = ["# Headers\n", MADE + "\n", "## Of requests\n"]
    lines += table(("header", "meaning"), ((f"`{name}`", text) for name, text in REQUEST.items()))
    lines += ["## Of answers\n"]
    lines += table(("header", "meaning"), ((f"`{name}`", text) for name, text in RESPONSE.items()))
    return "\n".join(lines)
