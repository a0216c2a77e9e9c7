"""Starts the stores' transfers between steps, and reports their ends.

Steps never wait for a transport. A plan without slices copies blocks to host memory; a transport's own thread does the
rest. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.core.errors import CopyError, DeviceMemoryError
from engine.core.kv.tiers import Transport
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner, StepPlan

_POLL_S = 0.002  # how long to wait for transports before the inbox is read again
_MAX_FLUSH_S = 10.0


class Offload:
    """Starts and polls the transports of the stores, by name. Does nothing where there are none."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, transports: Mapping[str, Transport], clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._runner, self._transports, self._clock = scheduler, runner, transports, clock

    def exchange(self, wait_s: float = 0.0) -> None:
        """Start the transfers that are wanted, and report those that ended."""
        if not self._transports:
            return
        orders = self._scheduler.tiers.start(self._clock())
        reports = []
        for name, transport in self._transports.items():
            ours = [transfer for transfer in orders if transfer.tier == name]
            if ours:
                transport.start(ours)
            reports += transport.finished(wait_s / len(self._transports))
        if reports:
            self._scheduler.transferred(reports)

    def learn(self) -> None:
        """Take in what others have changed in shared stores."""
        for name, transport in self._transports.items():
            for news in transport.news():
                self._scheduler.tiers.learn(name, news)

    def wait_for_loads(self) -> bool:
        """Give the transports a moment, if parked requests are all there is; False if there are none."""
        if not self._scheduler.has_parked:
            return False
        self.exchange(_POLL_S)
        return True

    def spill(self) -> bool:
        """Save some of the cached blocks that the stores lack; True while there is more to do."""
        if not self._transports:
            return False
        pairs = self._scheduler.tiers.spill()
        try:
            if pairs:
                self._runner.run(StepPlan(-1, swap_out=tuple(pairs))).wait()
        except DeviceMemoryError as error:
            self._scheduler.tiers.unstage()  # nothing was copied: these blocks are left out
            if isinstance(error, CopyError):
                self._scheduler.give_up_copies()
        self.exchange(_POLL_S)
        return self._scheduler.tiers.is_transferring

    def flush(self) -> None:
        """Save what can be saved in a short while."""
        until_s = self._clock() + _MAX_FLUSH_S
        while self.spill() and self._clock() < until_s:
            pass

    def close(self) -> None:
        """Close the transports, once they have finished what is queued."""
        for transport in self._transports.values():
            transport.close()
