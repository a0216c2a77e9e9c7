"""Long prompts that go by layers: what that is for, and what a chunk is that is not through them all."""

from __future__ import annotations

from engine.core.pacing import SHARE
from engine.core.plan import LayerRange, SequenceSlice, StepPlan
from engine.core.types import AbortCause
from tests.pure.world import STREAMS, World, decode_s, seconds

READ_S = 0.6e-6  # a position of its context that a chunk reads, however few tokens it has
LAYERS = 30


def reading(plan: StepPlan) -> float:
    """What a step takes where a prompt's context has to come from memory for each of its chunks."""
    return seconds(plan) + plan.cost(lambda whole: READ_S * sum(piece.start for piece in chunks(whole)))


def chunks(plan: StepPlan) -> list[SequenceSlice]:
    return [piece for piece in plan.slices if piece.start < piece.num_prompt]


class Layered(World):
    """It remembers its plans, and a long prompt in it is in the middle of its layers."""

    def __init__(self) -> None:
        super().__init__(num_layers=LAYERS)
        self.plans: list[StepPlan] = []
        run = self.driver.runner.run
        self.driver.runner.run = lambda plan: (self.plans.append(plan), run(plan))[1]  # type: ignore[method-assign]
        self.add("long", 3000)
        while not (self.plans and self.plans[-1].num_partial and self.layers[0] > 0):
            self.run(1)

    @property
    def layers(self) -> LayerRange:
        """Of the last plan's chunk."""
        layers = self.plans[-1].layers
        assert layers is not None
        return layers


def test_a_context_is_read_seldom_and_nobody_feels_it() -> None:
    work_s, worst = [], []
    for num_layers in (1, LAYERS):
        world = World(cost=reading, num_layers=num_layers)
        world.add("long", 8000)
        ratios = [taken / decode_s(STREAMS, 50 + index) for index, taken in enumerate(world.until("long"))]
        work_s.append(sum(ratios) - len(ratios))
        worst.append(max(ratios))
    whole, layered = zip(work_s, worst, strict=True)
    assert layered[0] < 0.6 * whole[0]
    assert layered[1] < 1 + 1.25 * SHARE < whole[1]


def test_a_chunk_counts_when_it_is_through_the_last_layer() -> None:
    world = Layered()
    stats, begun = world.driver.scheduler.stats, world.plans[0].slices[-1]
    before = stats.step_tokens.sum - len(world.plans) * STREAMS
    world.until("long")
    through = [piece for plan in world.plans if not plan.num_partial for piece in chunks(plan)]
    assert through[0].start == begun.start == 0
    assert through[1].start == through[0].num_tokens == begun.num_tokens
    assert stats.step_tokens.sum - len(world.plans) * STREAMS - before == 3000


def test_whoever_is_aborted_in_the_middle_leaves_nothing() -> None:
    world = Layered()
    world.add("other", 600)
    world.driver.scheduler.abort("long", AbortCause.DISCONNECT, world.driver.now)
    world.until("other")  # its chunk begins at the first layer, or the runner would object
    world.driver.scheduler.check_integrity()


def test_a_step_that_is_taken_back_begins_the_chunk_anew() -> None:
    world = Layered()
    scheduler = world.driver.scheduler
    plan = scheduler.plan(world.driver.now)
    assert plan is not None
    assert plan.layers is not None
    assert plan.layers.begin == world.layers.end
    scheduler.take_back(world.driver.now)
    scheduler.check_integrity()
    world.until("long")
