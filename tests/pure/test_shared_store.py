"""Cached blocks that other daemons keep: they come and go by themselves, and are read but never written."""

from __future__ import annotations

import random

import pytest

from engine.core.config import StoreSize
from engine.core.kv.tiers import News
from engine.core.stats import TransferKind
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config
from tests.pure.test_tiers import crowd, prompt, serve

SIZES = {"num_blocks": 10, "num_host_blocks": 12, "host_caching": True}


class Daemon(Driver):
    """A daemon with a disk of its own, which also reads the others' disks."""

    def __init__(self, depth: int = 0, num_own: int = 60, num_shared: int = 40) -> None:
        stores = (StoreSize("disk", num_own), StoreSize("shared", num_shared, is_shared=True))
        super().__init__(config(stores=stores, **SIZES), depth)  # type: ignore[arg-type]
        self.others: list[Daemon] = []
        self._learned: set[bytes] = set()

    def held(self) -> dict[bytes, list[int]]:
        """Return the pages on its disk by their names; saves under way are not among them."""
        index = self.scheduler.tiers.stores["disk"]
        return {name: self.slots[slot] for name, slot in index._block_of.items() if slot in self.slots}

    def learn(self) -> None:
        """Look at the others' indexes."""
        names = {name for other in self.others for name in other.held()}
        news = News(sorted(names - self._learned), sorted(self._learned - names))
        self._learned = names
        self.scheduler.tiers.learn("shared", news)

    def transfer(self, num_left: int = 0, *, is_good: bool = True) -> None:
        self.transfers += self.scheduler.tiers.start(self.now)
        while len(self.transfers) > num_left:
            transfer = self.transfers.pop(0)
            slots, is_there = self.slots, is_good
            if transfer.tier == "shared":
                assert transfer.kind is TransferKind.LOAD
                page = next(
                    (other.held()[transfer.name] for other in self.others if transfer.name in other.held()), None
                )
                slots, is_there = {transfer.slot: page or []}, is_good and page is not None
            if is_there:
                self.runner.transfer(transfer, slots)
            self.scheduler.transferred([(transfer, is_there)])


def pair(**sizes: int) -> tuple[Daemon, Daemon]:
    first, second = Daemon(**sizes), Daemon(**sizes)
    first.others, second.others = [second], [first]
    return first, second


def test_a_prompt_that_another_daemon_computed_is_loaded_and_not_saved_again() -> None:
    first, second = pair()
    for index in range(4):
        serve(first, f"first{index}", prompt(10 * index))
    while first.spill():
        pass
    assert serve(second, "early", prompt(0)) == (0, 0, 0), "it has not looked yet"
    second.learn()
    assert serve(second, "later", prompt(10)) == (0, 0, 16)
    hits, transferred = second.scheduler.stats.prefix_hits, second.scheduler.stats.transferred
    assert (hits["shared"], hits["disk"], transferred[TransferKind.LOAD]) == (16, 0, 4)
    while second.spill():
        pass
    assert transferred[TransferKind.SAVE] == 0, "the other daemon has all of it"
    second.check_streams()


def test_what_the_other_daemon_has_replaced_is_computed() -> None:
    first, second = pair()
    serve(first, "first", prompt(0))
    first.spill()
    second.learn()
    first.scheduler.tiers.stores["disk"].forget(0)  # the second daemon has not looked again
    assert serve(second, "again", prompt(0)) == (0, 0, 0)
    assert not second.scheduler.stats.failed_transfers[TransferKind.LOAD], "which is no fault"
    second.learn()
    second.check_streams()


def end(driver: Daemon) -> int:
    """Serve what is open; returns the tokens that came from other daemons."""
    driver.drain()
    driver.transfer()
    driver.check_streams()
    return driver.scheduler.stats.prefix_hits["shared"]


@pytest.mark.parametrize("seed", range(10))
def test_no_daemon_reads_what_is_not_there(seed: int) -> None:
    """Daemons replace blocks, look late, fail to read, take steps back, and end; a new one takes their place."""
    chance = random.Random(seed)
    sizes = {"depth": seed % 2, "num_own": chance.choice((12, 60)), "num_shared": chance.choice((6, 40))}
    daemons, hits = list(pair(**sizes)), 0
    for turn in range(400):
        driver, luck = chance.choice(daemons), chance.random()
        if turn % 80 == 79:
            old, other = daemons
            hits += end(old)
            new = Daemon(**sizes)
            daemons, new.others, other.others = [other, new], [other], [new]
        elif luck < 0.2:
            driver.add(crowd(chance, driver, str(turn)))
        elif luck < 0.25:
            driver.run_out_of_memory()
        elif luck < 0.4:
            driver.learn()
        elif luck < 0.5:
            driver.transfer(chance.randrange(4), is_good=chance.random() < 0.8)
        elif luck < 0.6 and not driver.launched:
            driver.spill()
        else:
            driver.step()
        check_scheduler(driver.scheduler)
    assert hits + sum(map(end, daemons)) > 0
