"""OpenTelemetry's semantic conventions: their version, the operations and histograms. tracing.py has the attributes.

The GenAI conventions have the status Development: names may change with any version. These are of version 1.41.1, the last
one that the versioned conventions published before GenAI moved to a separate repository, which has made no stable release
since. To move to another version, change both files, and the table in docs/observe/traces.md. Names that begin with `quire.`
are ours: the conventions have none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

VERSION: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{VERSION}"


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
    **{f"{version}/rerank": Operation("rerank", "rerank-") for version in ("", "/v1", "/v2")},
    **{f"{version}/classify": Operation("classify", "classify-") for version in ("", "/v1")},
    "/pooling": Operation("embeddings", "pool-"),
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
