"""The names of OpenTelemetry's semantic conventions that Quire uses, all in this file.

The GenAI conventions have the status Development: names may change with any version. These are of version 1.41.1, the last
one that the versioned conventions published before GenAI moved to a separate repository, which has made no stable release
since. To move to another version, change this file, and the table in docs/observe/traces.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

VERSION: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{VERSION}"

# Stable.
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
ERROR_TYPE: Final = "error.type"

# Development.
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"

PROVIDER_NAME: Final = "quire"  # the conventions allow a custom value

# Ours: the conventions have no name for these.
QUIRE_REQUEST_ID: Final = "quire.request.id"
QUIRE_TENANT: Final = "quire.tenant"
QUIRE_BATCH: Final = "quire.batch"
QUIRE_ABANDONED: Final = "quire.abandoned"  # the client left before the end
QUIRE_PREEMPTIONS: Final = "quire.preemptions"
QUIRE_PREEMPTED: Final = "quire.preempted"  # an event of the span "decode"
QUIRE_PROMPT: Final = "quire.prompt.index"  # of a request with several prompts
QUIRE_CHOICE: Final = "quire.choice.index"
QUIRE_PROMPT_TOKENS: Final = "quire.prompt.tokens"
QUIRE_TOKENS: Final = "quire.choice.tokens"
QUIRE_DRAFTED: Final = "quire.draft.tokens"
QUIRE_ACCEPTED: Final = "quire.draft.accepted_tokens"


class Operation(NamedTuple):
    """What an endpoint does, and how the ids of its answers begin."""

    name: str
    id_prefix: str = ""


# "chat", "text_completion" and "embeddings" are the conventions' own; a custom value may be used where none applies.
OPERATIONS: Final = {
    "/v1/chat/completions": Operation("chat", "chatcmpl-"),
    "/v1/responses": Operation("chat", "resp_"),
    "/v1/messages": Operation("chat", "msg_"),
    "/v1/completions": Operation("text_completion", "cmpl-"),
    "/v1/embeddings": Operation("embeddings"),
    "/v1/score": Operation("score", "score-"),
    "/score": Operation("score", "score-"),
}


class Histogram(NamedTuple):
    """A metric in seconds, with the bucket boundaries that the conventions ask for."""

    name: str
    description: str
    bounds: tuple[float, ...]


REQUEST_DURATION: Final = Histogram(
    "gen_ai.server.request.duration",
    "Generative AI server request duration such as time-to-last byte or last output token.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN: Final = Histogram(
    "gen_ai.server.time_to_first_token",
    "Time to generate first token for successful responses.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN: Final = Histogram(
    "gen_ai.server.time_per_output_token",
    "Time per output token generated after the first token for successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
