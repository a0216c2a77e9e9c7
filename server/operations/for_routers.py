"""What routers ask a replica: its model, limits, load, and where its KV events are published.

The paths and keys are those that vllm-router, sglang-router and llm-d read. Like all routes but the probes, they need a
key where the server has one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from engine.settings.kv_events_config import KVEventsConfig
from engine.system.version import VERSION
from server.answers.model import ServedModel
from server.answers.parts import InEngine, InInstanceId, InModel
from server.http.openapi import answers
from server.protocol.documents import ResponseBody


class ModelInfo(ResponseBody):
    """The served model."""

    model_path: str = Field(description="The served model's name; routers group replicas by it.")
    served_model_name: str = Field(description="The same.")
    tokenizer_path: str = Field(description="The same.")
    is_generation: bool = Field(description="False for a checkpoint without an LM head, which serves vectors alone.")
    max_context_length: int = Field(description="The longest prompt and answer, in tokens.")
    vocab_size: int = Field(description="Token ids are below it.")


class ServerInfo(ModelInfo):
    """The replica."""

    model_id: str = Field(description="The same.")
    instance_id: str = Field(description="A name of this process, made at its start.")
    version: str = Field(description="The daemon's version.")
    kv_block_size: int = Field(description="Tokens in a K/V block, as in KV events.")
    num_kv_blocks: int = Field(description="Blocks in the KV pool.")
    max_total_num_tokens: int = Field(description="Tokens in the KV pool.")
    max_running_requests: int = Field(description="As --max-num-seqs.")
    max_prefill_tokens: int = Field(description="As --max-num-batched-tokens.")
    tp_size: int = Field(description="Devices that share each layer.")
    dp_size: int = Field(description="Always 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource(KVEventsConfig):
    """Where KV events are published."""

    data_parallel_rank: int


class Load(ResponseBody):
    """The work of one data-parallel rank."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


router = APIRouter()


def _model(model: ServedModel) -> ModelInfo:
    name = model.names[0]
    return ModelInfo(
        model_path=name,
        served_model_name=name,
        tokenizer_path=name,
        is_generation=model.limits.generates,
        max_context_length=model.limits.max_model_len,
        vocab_size=model.limits.vocab_size,
    )


@router.get("/model_info", responses=answers(ModelInfo))
@router.get("/get_model_info", responses=answers(ModelInfo))
async def model_info(model: InModel) -> Response:
    """Return the served model's name and limits, as SGLang does. Also at /get_model_info."""
    return Response(_model(model).json_bytes(), media_type="application/json")


@router.get("/server_info", responses=answers(ServerInfo))
@router.get("/get_server_info", responses=answers(ServerInfo))
async def server_info(engine: InEngine, model: InModel, instance_id: InInstanceId) -> Response:
    """Return the replica's identity and limits, as SGLang does. Also at /get_server_info."""
    config = engine.config
    info = ServerInfo(
        **_model(model).model_dump(),
        model_id=model.names[0],
        instance_id=instance_id,
        version=VERSION,
        kv_block_size=config.block_size,
        num_kv_blocks=config.num_blocks,
        max_total_num_tokens=config.num_blocks * config.block_size,
        max_running_requests=config.max_num_seqs,
        max_prefill_tokens=config.max_num_batched_tokens,
        tp_size=engine.facts.num_ranks,
        dp_size=1,
    )
    return Response(info.json_bytes(), media_type="application/json")


@router.get("/kv_event_sources")
async def kv_event_sources(engine: InEngine) -> dict[str, EventSource]:
    """Return where KV events are published, by data-parallel rank; nothing without --kv-events-config."""
    config = engine.facts.kv_events
    return {} if config is None else {"0": EventSource(**asdict(config), data_parallel_rank=0)}


@router.get("/get_load")
async def get_load(engine: InEngine) -> list[Load]:
    """Return the requests and prompt and answer tokens that are being worked on or wait, as SGLang does."""
    stats = engine.stats
    held = stats.blocks_held * engine.config.block_size
    waiting = stats.num_waiting + stats.num_preempted + stats.num_background_waiting
    return [
        Load(
            dp_rank=0,
            num_reqs=stats.num_running + waiting,
            num_waiting_reqs=waiting,
            num_tokens=held + stats.num_waiting_tokens,
        )
    ]
