"""Keeps draws within their grammars: a matcher for each slot, a bit mask for each row.

    step N:    launch -> masks, from all tokens before -> draw
    step N+1:  launch -> `settle` step N: wait for its tokens, advance the matchers -> masks -> draw

Masks are computed while the device runs, and only a batch with constrained rows waits for the tokens of the previous
step, which are there by then or soon. A matcher is a function of its sequence's tokens: one that is lost (by a
preemption, a fork, a rolled back step) is rebuilt from them. A sequence with drafts has a row after each draft: its
matcher consumes the drafts one by one for their masks, and is then rewound. Engine thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.types import Grammar, Matcher
from engine.runtime.cuda.available import uses_triton
from engine.runtime.transfer import to_device

_BITS = np.arange(32)  # of a mask's word


class Constrained(NamedTuple):
    """A row of logits whose token a grammar must allow."""

    row: int  # in the step's ids
    at: int  # in the logits
    slot: int
    piece: SequenceSlice
    grammar: Grammar
    banned: frozenset[int] = frozenset()  # tokens to avoid, unless the grammar allows no other

    @property
    def num_tokens(self) -> int:
        """Return the answer's tokens before this row's."""
        return self.piece.start + self.piece.num_tokens - self.piece.num_prompt

    @property
    def known(self) -> Sequence[int]:
        """Return these tokens, without the last one while it is still being drawn."""
        first = self.piece.num_prompt
        return self.piece.tokens[first : first + self.num_tokens]


@dataclass(slots=True)
class _Slot:
    """A sequence's matcher, and the tokens it has consumed."""

    seq_id: int
    matcher: Matcher
    num_tokens: int = 0
    last: int = -1

    def accept(self, token_id: int) -> None:
        self.matcher.accept(token_id)
        self.num_tokens += 1
        self.last = token_id

    def give_back(self, count: int, last: int) -> None:
        """Rewind by `count` tokens, to where `last` was the last one."""
        self.matcher.rollback(count)
        self.num_tokens -= count
        self.last = last


@dataclass(slots=True)
class Outcome:
    """The state of a step's constrained rows after its tokens."""

    ended: list[int] = field(default_factory=list)  # rows whose answers are complete
    errors: dict[int, str] = field(default_factory=dict)  # by row


class ConstrainedStep:
    """The constrained rows of one step, from its draw until its tokens are known."""

    def __init__(self, rows: Sequence[tuple[Constrained, _Slot]]) -> None:
        self._rows = rows
        self._failed = {each.row: error for each, slot in rows if (error := slot.matcher.error()) is not None}
        self._outcome: Outcome | None = None
        self.drawn: dict[int, int] = {}  # by slot
        self.read: Callable[[], Sequence[int]] | None = None  # waits for the step's ids; set after the launch

    def settle(self) -> Outcome:
        """Wait for the tokens and advance the matchers, once; return the outcome."""
        if self._outcome is None:
            # A step whose launch ran out of memory is planned again; its tokens are not drawn yet.
            self._outcome = Outcome() if self.read is None else self._advance(self.read())
        return self._outcome

    def _advance(self, ids: Sequence[int]) -> Outcome:
        outcome = Outcome(errors=dict(self._failed))
        for each, slot in self._rows:
            if slot.num_tokens != each.num_tokens or not _agrees(slot, each.known, each.num_tokens):
                continue  # it follows a rejected draft
            token_id = self.drawn[each.slot] = ids[each.row]
            if slot.matcher.error() is not None or slot.matcher.is_complete():
                continue  # the token is void: its sequence has ended, or ends with the error
            slot.accept(token_id)
            error = slot.matcher.error()
            if error is not None:
                outcome.errors[each.row] = error
            elif slot.matcher.is_complete():
                outcome.ended.append(each.row)
        return outcome


class Constraints:
    """The matchers of the sequences that have grammars, by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._last: ConstrainedStep | None = None

    def apply(self, logits: Tensor, rows: Sequence[Constrained]) -> ConstrainedStep | None:
        """Mask forbidden tokens in logits [R, V] float32; None if no row is constrained."""
        if self._last is not None:
            self._last.settle()
        step = None
        if rows:
            slots: dict[int, _Slot] = {}
            for turn in _turns(rows):
                slots.update((each.row, self._catch_up(each)) for each in turn)
                masks = self._masks(turn, [slots[each.row] for each in turn], logits.shape[1])
                apply_masks(logits, [each.at for each in turn], masks)
            step = ConstrainedStep([(each, slots[each.row]) for each in rows])
            for each in rows:
                slot = slots[each.row]
                if slot.num_tokens > each.num_tokens:  # by drafts, and this row precedes them
                    slot.give_back(slot.num_tokens - each.num_tokens, each.known[-1] if each.num_tokens else -1)
        self._last = step
        return step

    def count_allowed(self, each: Constrained, drafts: Sequence[int]) -> int:
        """Return the length of the longest accepted prefix of `drafts`."""
        if self._last is not None:
            self._last.settle()
        return self._catch_up(each).matcher.count_allowed(drafts)

    def _catch_up(self, each: Constrained) -> _Slot:
        """Return the slot's matcher, advanced by all tokens of the answer so far."""
        slot, known, num_tokens = self._slots.get(each.slot), each.known, each.num_tokens
        if slot is None or slot.seq_id != each.piece.seq_id or not _agrees(slot, known, num_tokens):
            slot = self._slots[each.slot] = _Slot(each.piece.seq_id, each.grammar.start())
        for token_id in known[slot.num_tokens :]:
            slot.accept(token_id)
        if slot.num_tokens < num_tokens:  # drawn by the previous step, not yet committed
            assert self._last is not None
            slot.accept(self._last.drawn[each.slot])
        return slot

    def _masks(self, rows: Sequence[Constrained], slots: Sequence[_Slot], vocab_size: int) -> NDArray[np.int32]:
        """Return masks [rows, words]; a sequence that ended or failed allows everything."""
        masks = np.zeros((len(rows), -(-vocab_size // 32)), np.int32)
        for _, run in groupby(range(len(rows)), key=lambda row: type(rows[row].grammar)):
            first, *others = run  # matchers of one kind, whose masks are filled together
            matchers = [slot.matcher for slot in slots[first : first + len(others) + 1]]
            rows[first].grammar.fill_masks(matchers, masks[first:].ctypes.data, masks.shape[1])
        for mask, each, slot in zip(masks, rows, slots, strict=True):
            if slot.matcher.error() is not None or slot.matcher.is_complete():
                mask[:] = -1
            elif each.banned:
                _forbid(mask, each.banned)
        return masks


def _turns(rows: Sequence[Constrained]) -> list[list[Constrained]]:
    """Return the first rows of all slots, then the second ones (after a draft), ..."""
    turns: defaultdict[int, list[Constrained]] = defaultdict(list)
    num_before: Counter[int] = Counter()
    for each in rows:
        turns[num_before[each.slot]].append(each)
        num_before[each.slot] += 1
    return list(turns.values())


def _agrees(slot: _Slot, known: Sequence[int], num_tokens: int) -> bool:
    """Return False if the matcher's last token was never committed."""
    if slot.num_tokens > num_tokens:
        return False
    return not 0 < slot.num_tokens <= len(known) or known[slot.num_tokens - 1] == slot.last


def _forbid(mask: NDArray[np.int32], banned: Collection[int]) -> None:
    """Clear the bits of some tokens, unless none would remain."""
    less = mask.view(np.uint32).copy()
    for token_id in banned:
        if token_id >> 5 < len(less):
            less[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    if less.any():
        mask[:] = less.view(np.int32)


def pack_mask(allowed: frozenset[int], vocab_size: int) -> NDArray[np.int32]:
    """Return the mask that allows these tokens alone."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def apply_masks(logits: Tensor, rows: Iterable[int], masks: NDArray[np.int32]) -> None:
    """Write -inf to logits whose bits are not set; mask i is for the i-th of `rows`."""
    if not logits.is_cuda:
        for row, mask in zip(rows, masks, strict=True):
            _mask_on_host(logits[row].numpy(), mask)
        return
    at = to_device(list(rows), torch.int64, logits.device)
    bits = to_device(masks, torch.int32, logits.device)
    if uses_triton(logits):
        from engine.runtime.cuda.mask import mask_rows

        mask_rows(logits, at, bits)
        return
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (bits.view(torch.uint8)[..., None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    logits.index_put_((at,), logits[at].masked_fill_(allowed == 0, -torch.inf))


def _mask_on_host(logits: NDArray[np.float32], mask: NDArray[np.int32]) -> None:
    """Mask with few writes, since most masks allow nearly all tokens or nearly none."""
    ruled_out = ~mask
    if np.count_nonzero(mask) < np.count_nonzero(ruled_out):
        allowed = _set_bits(mask, len(logits))
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
    else:
        logits[_set_bits(ruled_out, len(logits))] = -np.inf


def _set_bits(words: NDArray[np.int32], size: int) -> NDArray[np.intp]:
    """Return the tokens below `size` whose bits are set, in order."""
    at = np.flatnonzero(words)
    is_set = np.unpackbits(words[at].view(np.uint8), bitorder="little").view(np.bool_)
    tokens = (at[:, None] * 32 + _BITS).ravel()[is_set]
    return tokens[: np.searchsorted(tokens, size)]
