"""What can never run is refused when it is added, with a sentence that names both numbers."""

from __future__ import annotations

import pytest

from engine.core.errors import ClientError, ContextLengthError, InvalidRequestError, NeverFitsError
from engine.core.scheduling.admission import peak_positions
from engine.core.scheduling.scheduler import Scheduler
from tests.pure.driver import Driver, config, request


@pytest.mark.parametrize(
    ("changes", "error", "numbers"),
    [
        ({"prompt": ()}, InvalidRequestError, ["empty"]),
        ({"prompt": (1,) * 65}, ContextLengthError, ["64", "65"]),
        ({"prompt": (1,) * 60, "max_tokens": 5}, ContextLengthError, ["64", "65", "60", "5"]),
        ({"n": 7}, NeverFitsError, ["7", "6"]),
    ],
)
def test_refusals_name_their_numbers(changes: dict[str, object], error: type[ClientError], numbers: list[str]) -> None:
    scheduler = Scheduler(config())
    with pytest.raises(error) as caught:
        scheduler.add(request(**changes))
    assert all(number in str(caught.value) for number in numbers)
    assert not scheduler.has_work


def test_a_request_larger_than_the_pool_is_refused_and_one_that_just_fits_runs() -> None:
    driver = Driver(config(num_blocks=4))
    with pytest.raises(NeverFitsError, match=r"5 KV blocks.*pool has 4"):
        driver.add(request(prompt=(1,) * 8, max_tokens=10, eos_token_ids=frozenset()))
    driver.add(request(prompt=(1,) * 8, max_tokens=9, eos_token_ids=frozenset()))
    driver.drain()
    driver.check_streams()


def test_the_last_generated_token_needs_no_place() -> None:
    assert peak_positions(8, 9) == 16
    assert peak_positions(8, 0) == 8
