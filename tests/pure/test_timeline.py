"""What is told of an answer's time, where the engine and a stop string do not end it together."""

from __future__ import annotations

from engine.core.types import FinishReason, PromptInfo, RequestTimings, TokenEvent
from server.telemetry.events import Timeline

DROPPED = RequestTimings(5.0, 0.0, 0.0, 0)


def test_what_was_drafted_for_an_answer_that_a_stop_string_ended_is_told() -> None:
    timeline = Timeline(1)
    timeline.hear(0, TokenEvent("r", 0, (1, 2, 3), prompt=PromptInfo(0, None, 0.1, 0.1)))
    timeline.stop(0)
    assert not timeline.is_complete
    timings = RequestTimings(0.1, 0.1, 9.0, 2, num_drafted=12, num_accepted=9)
    timeline.hear(0, TokenEvent("r", 0, (), finish_reason=FinishReason.LENGTH, timings=timings))
    spans = timeline.spans()
    assert timeline.is_complete
    assert timeline.finish_reasons == [FinishReason.STOP]
    assert spans is not None
    assert (spans.num_preemptions, spans.num_drafted, spans.num_accepted) == (2, 12, 9)
    assert spans.decode_s < 9.0, "the client's answer was over before"


def test_what_is_dropped_beside_what_ran_does_not_change_its_times() -> None:
    timeline = Timeline(2)
    timeline.hear(1, TokenEvent("s", 0, (), finish_reason=FinishReason.DROPPED, timings=DROPPED))
    assert timeline.is_dropped
    spans = timeline.spans()
    assert spans is not None
    assert spans.queue_s == 5.0
    timeline.hear(0, TokenEvent("r", 0, (1,), prompt=PromptInfo(0, None, 0.1, 0.2)))
    assert not timeline.is_dropped
    spans = timeline.spans()
    assert spans is not None
    assert (spans.queue_s, spans.prefill_s) == (0.1, 0.2)
