"""The sampler over the kernels: biases, bans and penalties against their definition in float64, while sequences grow, change
slots, are forked, and say things before the host knows them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.step import Sample
from engine.core.types import SamplingParams
from engine.runtime.sampling import draw, sampler
from engine.runtime.sampling.draw import _draw_in_torch
from engine.runtime.sampling.sampler import Sampler, _rows, _wish

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 90
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.7}


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no device."""
    for module in (draw, sampler):
        monkeypatch.setattr(module, "uses_triton", lambda x: True)
    monkeypatch.setattr(draw, "native", lambda: None)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 64, "temperature": 0.8, "seed": 7} | fields))  # type: ignore[arg-type]


class Sequence:
    """One that says what it is told to."""

    def __init__(self, slot: int, seq_id: int, sampling: SamplingParams, prompt: list[int]) -> None:
        self.slot, self.seq_id, self.params, self.num_prompt = slot, seq_id, sampling, len(prompt)
        self.tokens = list(prompt)

    def slice(self, *, is_last_known: bool = True, num_samples: int = 1) -> SequenceSlice:
        """Its whole text, or its last token alone, as a decode step has it."""
        length, known = len(self.tokens), self.tokens[: len(self.tokens) - (not is_last_known)]
        samples = tuple(Sample(self.slot + i, self.params.seed + i) for i in range(num_samples))
        return SequenceSlice(self.slot, self.seq_id, self.num_prompt, self.params, known, samples, length - 1, 1)


def edited(logits: Tensor, piece: SequenceSlice, text: list[int]) -> Tensor:
    """One row by definition, token by token."""
    asked, row = piece.params, logits.double().clone()
    if asked.allowed_token_ids is not None:
        row[[token for token in range(VOCAB) if token not in asked.allowed_token_ids]] = -math.inf
    for token, bias in asked.logit_bias:
        row[token] += bias
    if len(text) - piece.num_prompt < asked.min_tokens:
        row[list(asked.eos_token_ids | asked.stop_token_ids)] = -math.inf
    answer = tuple(text[piece.num_prompt :])
    for *before, last in asked.bad_words:
        if last < VOCAB and len(before) <= len(answer) and answer[len(answer) - len(before) :] == tuple(before):
            row[last] = -math.inf
    for token in set(text):
        value = row[token] / asked.repetition_penalty if row[token] > 0 else row[token] * asked.repetition_penalty
        said = text[piece.num_prompt :].count(token)
        row[token] = value - asked.frequency_penalty * said - asked.presence_penalty * (said > 0)
    return row


def step(owner: Sampler, pieces: list[SequenceSlice], texts: list[list[int]], last_ids: Tensor) -> None:
    """Draw for all, and compare."""
    rows = _rows(pieces)
    logits = (torch.randn(len(rows), VOCAB) * 3).to(DEVICE)
    expected = [edited(logits[row.at].cpu(), row.piece, texts[pieces.index(row.piece)]) for row in rows]
    drawn = owner.sample(pieces, logits, last_ids)
    torch.testing.assert_close(logits.cpu().double(), torch.stack(expected), rtol=1e-6, atol=1e-5)
    assert drawn.ids.tolist() == _draw_in_torch(logits.clone(), [_wish(row) for row in rows]).ids.tolist()
    assert last_ids[[sample.slot for piece in pieces for sample in piece.samples]].tolist() == drawn.ids.tolist()


def check(owner: Sampler, sequences: list[Sequence], last_ids: Tensor, **how: object) -> None:
    step(owner, [each.slice(**how) for each in sequences], [each.tokens for each in sequences], last_ids)  # type: ignore[arg-type]


def test_penalties_follow_a_text_as_it_grows() -> None:
    """Known by the host or not, told one by one or several at once; other rows of the step ask for nothing."""
    numbers = random.Random(3)
    wishes = [PENALTIES, {}, {"repetition_penalty": 0.8}, {"frequency_penalty": 1.1, "temperature": 0.0}]
    sequences = [
        Sequence(slot, slot, params(**wish), numbers.choices(range(VOCAB), k=5 + slot))
        for slot, wish in enumerate(wishes)
    ]
    owner, last_ids = Sampler(DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    for is_last_known, num_new in ((True, 0), (False, 1), (False, 1), (True, 1), (True, 3), (False, 1)):
        for each in sequences:
            each.tokens += numbers.choices(range(20), k=num_new)
            last_ids[each.slot] = each.tokens[-1] if not is_last_known else -1  # what is known is not looked up
        check(owner, sequences, last_ids, is_last_known=is_last_known)


def test_a_seat_that_changes_hands_and_a_step_that_comes_again() -> None:
    owner, last_ids = Sampler(DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    first = Sequence(2, 0, params(**PENALTIES), [1, 2, 2, 3])
    check(owner, [first], last_ids)
    first.tokens.append(5)
    last_ids[2] = 5
    check(owner, [first], last_ids, is_last_known=False)
    last_ids[2] = 5
    check(owner, [first], last_ids, is_last_known=False)  # as after a want of memory
    first.tokens[-1] = 6  # and again, after what the step before had drawn was taken back as well
    check(owner, [first], last_ids)
    other = Sequence(2, 1, params(**PENALTIES), [1, 1, 4, 4, 4, 9])
    check(owner, [other], last_ids)


def test_a_failure_in_between_leaves_no_half_counted_line(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, last_ids = Sampler(DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    sequence = Sequence(0, 0, params(**PENALTIES), [1, 2, 2])
    check(owner, [sequence], last_ids)
    sequence.tokens.append(8)
    from engine.runtime.cuda import token_counts

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(token_counts, "to_device", fail)
        with pytest.raises(torch.OutOfMemoryError):
            check(owner, [sequence], last_ids)
    check(owner, [sequence], last_ids)


def test_samples_of_one_prompt_share_its_counts() -> None:
    owner, last_ids = Sampler(DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    parent = Sequence(0, 0, params(**PENALTIES), [3, 4, 4, 50])
    check(owner, [parent], last_ids, num_samples=3)
    forks = [Sequence(slot, slot, parent.params, parent.tokens) for slot in range(3)]
    for fork in forks:
        fork.num_prompt = 4
        fork.tokens.append(int(last_ids[fork.slot]))
    check(owner, forks, last_ids, is_last_known=False)


def test_biases_and_bans_of_several_rows() -> None:
    ends = {"min_tokens": 3, "eos_token_ids": frozenset({2, 3}), "stop_token_ids": frozenset({7})}
    wishes = [
        {"logit_bias": tuple((token, token / 7 - 5) for token in range(VOCAB))},
        {},
        ends | {"logit_bias": ((2, 100.0), (5, -100.0))},
        ends | PENALTIES | {"logit_bias": ((9, 2.5),)},
        {"temperature": 0.0, "logit_bias": ((89, 100.0), (0, 40.0))},
    ]
    sequences = [Sequence(slot, slot, params(**wish), [8, 9, slot]) for slot, wish in enumerate(wishes)]
    for num_said in (0, 2, 3):
        owner, last_ids = Sampler(DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
        for each in sequences:
            each.tokens = [*each.tokens[:3], *[9] * num_said]
        check(owner, sequences, last_ids)
    assert last_ids[4] == 89


def test_bad_words_and_allowed_tokens_of_several_rows() -> None:
    """Also where the last token is known to the device alone, and where a token is banned in several ways."""
    words = ((3,), (1, 2), (4, 2), (6, 7, 8), (9, 7, 8), (1, VOCAB + 3), (5, 5, 5, 2))
    wishes = [
        {"bad_words": words},
        {"bad_words": words, "logit_bias": ((2, 50.0), (3, 60.0), (8, 40.0)), "temperature": 0.0},
        {},
        {"allowed_token_ids": frozenset({2, 8, 70}), "bad_words": words, **PENALTIES},
        {"allowed_token_ids": frozenset(range(0, VOCAB, 2)), "min_tokens": 3, "eos_token_ids": frozenset({2})},
    ]
    sequences = [Sequence(slot, slot, params(**wish), [6, 7, 1]) for slot, wish in enumerate(wishes)]
    owner, last_ids = Sampler(DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    check(owner, sequences, last_ids)  # the prompt is not a part of the answer
    for token in (1, 4, 6, 7, 9, 7, 5, 5, 5):
        for is_last_known in (False, True):
            for each in sequences:
                each.tokens += [token] if not is_last_known else []
                last_ids[each.slot] = token if not is_last_known else -1
            check(owner, sequences, last_ids, is_last_known=is_last_known)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, for the sum that is not taken
def test_a_ban_rules_out_what_is_infinite() -> None:
    sampling = params(min_tokens=1, eos_token_ids=frozenset({4, VOCAB + 5}))  # one that the model has no logit for
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, 4] = math.inf
    pieces = [Sequence(0, 0, sampling, [1]).slice()]
    drawn = Sampler(DEVICE).sample(pieces, logits, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert drawn.is_finite.all()
