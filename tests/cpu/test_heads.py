"""Heads in the runner: a head that is right by construction is always right, through all that happens to its blocks."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.core.config import DraftCosts
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.parts import LayerAttention
from engine.runtime.speculation import heads
from tests.cpu.model_driver import Served, make_runner, request, serve, settings
from tests.cpu.test_constraint import END, StepGrammar

VOCAB, WIDTH = 61, 8
_generator = torch.Generator().manual_seed(5)
_TABLE = torch.randn(VOCAB, WIDTH, generator=_generator)
_MIXER = torch.randn(WIDTH, VOCAB, generator=_generator)
_SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=WIDTH, scale=1.0)
_random = random.Random(7)
# No two begin with the same token: a head's K/V of the last position that prompts share fit one of them.
PROMPTS = [
    [first, *(_random.randrange(VOCAB) for _ in range(length))] for first, length in enumerate((1, 2, 3, 16, 29, 8, 39))
]
REGIMES: dict[str, dict[str, int]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "tiny_pool": {"num_blocks": 22},
    "block_size_1": {"block_size": 1, "num_blocks": 600},
    "swapping": {"num_blocks": 22, "num_host_blocks": 100},
}


def average(values: Tensor, attention: LayerAttention, layer: int = 0) -> Tensor:
    """Return the mean of the values of all positions up to each."""
    nothing = torch.zeros_like(values)[:, None]
    return attention(layer, nothing, nothing, values[:, None])[:, 0]


class Bag:
    """A model whose state is the mean of the embeddings of all tokens up to a position."""

    vocab_size, max_model_len, dtype = VOCAB, 256, torch.float32
    states, described = (_SPEC,), None

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        states = average(_TABLE[ids], attention)
        return states if rows is None else states[rows]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = 6 * torch.sin(3 * hidden @ _MIXER)
        return logits if out is None else out.copy_(logits)


class BagHead(Bag):
    """Computes the target's next state twice: from its K/V, which hold the later tokens, and from its states.

    The result is their mean, which is right only if both are: all tokens shifted by one, all positions and states.
    """

    streams, needs_all = (), True
    target_hidden_size = hidden_size = WIDTH

    def project(self, states: Tensor) -> Tensor:
        return states

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention) -> Tensor:  # type: ignore[override]
        num = positions[:, None] + 1.0
        later = _TABLE[ids]
        values = torch.where(positions[:, None] == 0, later + states, later)
        by_cache = average(values, attention, layer=1) * num / (num + 1)
        by_state = (states * num + later) / (num + 1)
        return (by_cache + by_state) / 2

    def store(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention) -> None:
        self.forward(ids, positions, states, attention)


ASKED: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "several": {"temperature": 1.0, "n": 3},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    "constrained": {"temperature": 1.0, "grammar": StepGrammar(reach=3), "eos_token_ids": frozenset({END})},
}


@cache
def plainly(asked: str) -> Served:
    return run(asked, has_head=False)[0]


def run(name: str, *, has_head: bool, **regime: int) -> tuple[Served, Scheduler]:
    config = settings(**regime, num_speculative_tokens=4 * has_head)
    asked = [
        request(f"r{i}", prompt, **{"seed": i, "max_tokens": 14, **ASKED[name]}) for i, prompt in enumerate(PROMPTS)
    ]
    model, scheduler = Bag(), Scheduler(config)
    runner = make_runner(model, config, head=BagHead() if has_head else None)
    return serve(model, config, asked, apart=1, scheduler=scheduler, runner=runner), scheduler


@pytest.mark.parametrize(("name", "regime"), [("greedy", "roomy"), *(("sampled", regime) for regime in REGIMES)])
def test_a_head_that_is_right_is_always_right(name: str, regime: str) -> None:
    served, scheduler = run(name, has_head=True, **REGIMES[regime])
    assert served.ids == plainly(name).ids
    stats = scheduler.stats
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 20


@pytest.mark.parametrize(
    ("name", "regime"),
    [
        ("penalised", "roomy"),
        ("constrained", "roomy"),
        ("constrained", "chunked"),
        *(("several", regime) for regime in REGIMES),
    ],
)
def test_answers_stay_the_same(name: str, regime: str) -> None:
    served, scheduler = run(name, has_head=True, **REGIMES[regime])
    assert served.ids == plainly(name).ids
    assert scheduler.stats.spec_accepted_tokens > 0


class Watched(BagHead):
    """Notes how many rows it computes, and the first position that each attends to, by averages of positions."""

    def __init__(self) -> None:
        self.firsts, self.num_stored = list[float](), 0

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention) -> Tensor:  # type: ignore[override]
        self.firsts += (2 * self._average(positions, attention) - positions).tolist()
        num = positions[:, None] + 1.0
        return (states * num + _TABLE[ids]) / (num + 1)

    def store(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention) -> None:
        self.num_stored += len(ids)
        self._average(positions, attention)

    def _average(self, positions: Tensor, attention: LayerAttention) -> Tensor:
        return average(positions[:, None].float().expand(-1, WIDTH), attention, layer=1)[:, 0]


@pytest.mark.parametrize("most_idle", [2, 100])
def test_a_head_runs_where_drafts_pay_alone(most_idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others no draft pays, and after a while nothing is stored; the last sequences get drafts all the same."""
    monkeypatch.setattr(heads, "_MOST_IDLE", most_idle)
    dear = ((1, 1.0), (3, 1.1), (64, 64.0))
    config = settings(num_speculative_tokens=4, draft_costs=DraftCosts(dear, dear, ((1, 0.01),)))
    asked = [request(f"r{i}", prompt, max_tokens=12 + 20 * (i > 5)) for i, prompt in enumerate(PROMPTS)]
    head, model, scheduler = Watched(), Bag(), Scheduler(config)
    served = serve(model, config, asked, scheduler=scheduler, runner=make_runner(model, config, head=head))
    assert served.ids == serve(model, settings(), asked).ids
    assert len(head.firsts) == scheduler.stats.spec_draft_tokens == scheduler.stats.spec_accepted_tokens > 2
    blocks = torch.tensor(head.firsts) / config.block_size
    torch.testing.assert_close(blocks, blocks.round(), atol=1e-2, rtol=0)  # nothing that was not stored is attended to
    was_left_out = most_idle == 2
    assert (blocks.max() > 0.5) == was_left_out
    num_computed = sum(len(each.prompt) + each.params.max_tokens - 1 for each in asked)
    assert (head.num_stored < num_computed) == was_left_out


def test_a_shared_prefix_costs_at_most_its_last_position() -> None:
    """The second prompt finds the first one's blocks, and the head's K/V in them; it goes on with another token."""
    config = settings(num_speculative_tokens=4)
    scheduler, runner = Scheduler(config), make_runner(Bag(), config, head=BagHead())
    for name, prompt in (("a", PROMPTS[6]), ("b", [*PROMPTS[6][:20], 5, 6, 7]), ("c", PROMPTS[6])):
        num_drafts = scheduler.stats.spec_draft_tokens
        num_right = scheduler.stats.spec_accepted_tokens
        asked = request(name, prompt, max_tokens=16)
        served = serve(Bag(), config, [asked], scheduler=scheduler, runner=runner)
        assert served.ids == serve(Bag(), settings(), [asked]).ids
        num_drafts, num_right = (
            scheduler.stats.spec_draft_tokens - num_drafts,
            scheduler.stats.spec_accepted_tokens - num_right,
        )
        assert num_right == num_drafts if name != "b" else num_drafts > 0
    assert scheduler.stats.prefix_hit_tokens >= 20
