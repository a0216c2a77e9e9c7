"""All that counts tokens and ends agrees to the last one, whatever ends a sequence, and whenever."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import NeverFitsError
from engine.core.types import AbortCause, BeamParams, EarlyStopping
from tests.pure.driver import EOS, FAILS, Driver, config, request

BEAMS = BeamParams(width=3, length_penalty=1.0, early_stopping=EarlyStopping.NO)

asked = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 20).map(lambda length: tuple(range(length))),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 9),
        "top_k": st.sampled_from([0, 0, FAILS]),
        "beam": st.sampled_from([None, None, BEAMS]),
        "is_background": st.booleans(),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset([EOS])]),
        "max_queue_s": st.sampled_from([None, None, 0.05]),
    }
)
abort = st.tuples(
    st.integers(0, 7),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([AbortCause.DISCONNECT, AbortCause.STOP_STRING, AbortCause.SHUTDOWN]),
)


@settings(deadline=None)
@given(
    requests=st.lists(asked, min_size=1, max_size=8),
    aborts=st.dictionaries(st.integers(0, 30), abort, max_size=8),
    mode=st.sampled_from([{}, {"num_blocks": 12}, {"num_speculative_tokens": 3}, {"num_host_blocks": 12}]),
    depth=st.integers(0, 3),
)
def test_counters_and_histograms_agree_after_every_step(
    requests: list[dict[str, object]],
    aborts: dict[int, tuple[int, int | None, AbortCause]],
    mode: dict[str, int],
    depth: int,
) -> None:
    """Aborts at any step, stop strings, errors, ends in the queue, drafts, several choices, beams, preemptions."""
    driver = Driver(config(max_model_len=40, **mode), 0 if "num_speculative_tokens" in mode else depth)
    for number, fields in enumerate(requests):
        with suppress(NeverFitsError):
            driver.add(request(str(number), **fields))  # type: ignore[arg-type]  # as they are named
    for step in range(31):
        if step in aborts:
            which, choice, cause = aborts[step]
            driver.take(driver.scheduler.abort(str(which), cause, driver.now, choice))
            driver.check_totals()
        driver.take(driver.scheduler.drop_hopeless(driver.now))
        driver.step()
        driver.check_totals()
    driver.drain()
    driver.check_totals()
    stats = driver.scheduler.stats
    assert stats.request_generation_tokens.sum == stats.generation_tokens
