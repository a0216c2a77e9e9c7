"""The deployments of Ray Serve: `serve run server.ray_serve.deployment:build model=MODEL`.

Ray pickles what its processes send each other. Requests are routed by Ray's power of two choices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.core.errors import EngineDeadError
from server.answers.models import Models
from server.daemon import LEAVE_S, WATCH_S, leave
from server.http.in_process import Forwarded, Piece, respond
from server.operations.health import check_health
from server.protocol.errors import ApiError
from server.ray_serve.asgi import Ingress
from server.serve import open_app
from server.settings.flags import load_settings

log = logging.getLogger("quire.ray")

MAX_ONGOING = 4096  # of a replica: its own queue refuses, with a time to try again
_CHECK_PERIOD_S = 10.0  # a replica that fails three checks, or does not answer them, is replaced
_AUTOSCALING = {"min_replicas": 1, "target_ongoing_requests": 16, "upscale_delay_s": 10, "downscale_delay_s": 360}


class Options(BaseModel, extra="forbid"):
    """Arguments of `build`."""

    model: str | None = None
    flags: list[str] = Field(default_factory=list)  # of `quire serve`
    replicas: int = Field(1, ge=1)
    ingress_replicas: int = Field(1, ge=1)
    autoscaling: dict[str, Any] | None = None  # fields of Ray's AutoscalingConfig, in place of `replicas`
    drain_s: float = 30.0  # for open requests of a replica that is replaced
    cpus: float = 1.0  # of each process of a replica
    gpus: float = 0.0
    tensor_parallel_size: int = Field(1, ge=1)


class Daemon:
    """A replica: the application of `quire serve`, with its engine."""

    async def __init__(self, argv: list[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        self._app = await asyncio.to_thread(open_app, argv)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        self._models: Models = self._app.state.models
        self._num_open = 0
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """End the process when the engine is dead or hangs and open requests have their error; Ray replaces the replica."""
        while not (fault := self._fault()):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(WATCH_S)
        log.critical("exiting: %s", fault)
        for engine in self._models.engines:
            engine.order_stop(0.0)  # refuses what the router still sends
        self._models.abandon(EngineDeadError(f"{fault} Send the request again."))
        for _ in range(int(LEAVE_S / WATCH_S)):
            if self._num_open:
                await asyncio.sleep(WATCH_S)
        leave()

    def _fault(self) -> str:
        """Return why /health is red, or ""."""
        try:
            check_health(self._models, self._app.state.config.stall_limit_s)
        except ApiError as error:
            return error.message
        return ""

    async def check_health(self) -> None:
        """Raise RuntimeError where /health is red. Ray calls it, and replaces a replica that fails or does not answer."""
        if fault := self._fault():
            raise RuntimeError(fault)

    async def respond(self, request: Forwarded) -> AsyncIterator[Piece]:
        """Yield the answer to a request."""
        self._num_open += 1
        try:
            async for piece in respond(self._app, Forwarded(*request)):
                yield piece
        finally:
            self._num_open -= 1

    async def __del__(self) -> None:  # Ray awaits it when no request is open any more
        if lifespan := getattr(self, "_lifespan", None):
            await lifespan.__aexit__(None, None, None)


@serve.ingress()
class Front:
    """The application that clients call."""

    def __init__(self, argv: list[str], daemons: DeploymentHandle) -> None:
        self._daemons = daemons.options(stream=True)
        self._max_body_bytes = load_settings(argv).max_body_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what Ray calls for each request."""
        return Ingress(self._answer, self._max_body_bytes)

    async def _answer(self, request: Forwarded) -> AsyncIterator[Piece]:
        pieces = self._daemons.respond.remote(request)
        try:
            async for piece in pieces:
                yield piece
        finally:
            pieces.cancel()


def build(args: Mapping[str, Any]) -> Application:
    """Return the application, for `serve run` and RayService."""
    options = Options.model_validate(args)
    argv = [*([options.model] if options.model else []), *options.flags]
    if options.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    load_settings(argv)  # a wrong flag is said here, before anything is started
    daemons = serve.deployment(Daemon).options(**_daemon_options(options)).bind(argv)
    front = serve.deployment(Front).options(
        name="Ingress", num_replicas=options.ingress_replicas, max_ongoing_requests=MAX_ONGOING
    )
    return front.bind(argv, daemons)


def _daemon_options(options: Options) -> dict[str, Any]:
    size = options.tensor_parallel_size
    cpus, gpus = size * options.cpus, size * options.gpus
    scaling: dict[str, Any] = (
        {"num_replicas": options.replicas}
        if options.autoscaling is None
        else {"autoscaling_config": {**_AUTOSCALING, **options.autoscaling}}
    )
    return {
        "name": "Daemon",
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": options.drain_s + 30,
        "health_check_period_s": _CHECK_PERIOD_S,
        "health_check_timeout_s": _CHECK_PERIOD_S,
        # The ranks are processes of this actor, and see its GPUs and no others.
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        **({} if size == 1 else _one_node(cpus, gpus)),
        **scaling,
    }


def _one_node(cpus: float, gpus: float) -> dict[str, Any]:
    """Return the placement group of a replica with several ranks: one bundle, because Ray shows an actor one bundle's GPUs."""
    bundle = {"CPU": cpus, "GPU": gpus}
    return {
        "placement_group_bundles": [{name: amount for name, amount in bundle.items() if amount}],
        "placement_group_strategy": "STRICT_PACK",
    }
