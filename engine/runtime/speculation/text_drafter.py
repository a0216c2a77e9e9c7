"""Drafts from text: what followed earlier occurrences of a sequence's last tokens, in itself or in recent answers.

This helps where an answer repeats its prompt, itself or an earlier answer, as in summaries, edits of code, agents that
call the same tools and conversations with documents. It keeps tokens only, four bytes each, in arrays that numpy
searches. Engine thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from engine.core.rows import SequenceSlice
from engine.core.step import StepPlan

Ids = NDArray[np.int32]
_END = -1  # behind each answer; no token has this id
_MAX_PLACES = 256  # the latest of those that a search compares
_MAX_ROOTS, _MAX_TOKENS = 64, 65536  # of recent answers: groups that share them, and the tokens of each


@dataclass(slots=True)
class _Text:
    """A sequence's tokens, as far as they are known."""

    seq_id: int
    num_prompt: int
    known: list[int]  # the runner's own list, which grows
    root: bytes = b""
    tokens: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    length: int = 0

    def catch_up(self) -> Ids:
        known = self.known
        if len(known) > len(self.tokens):
            self.tokens = np.concatenate([self.tokens[: self.length], np.empty(2 * len(known), np.int32)])
        self.tokens[self.length : len(known)] = known[self.length :]
        self.length = len(known)
        return self.tokens[: self.length]


class _Answers:
    """Recent answers, one after the other."""

    def __init__(self, most: int) -> None:
        self._each = deque[Ids](maxlen=most)
        self.tokens = np.empty(0, np.int32)

    def add(self, answer: Ids) -> None:
        self._each.append(np.append(answer[-_MAX_TOKENS:], np.int32(_END)))
        while sum(map(len, self._each)) > _MAX_TOKENS + 1:
            self._each.popleft()
        self.tokens = np.concatenate(self._each)


class TextDrafter:
    """Finds the longest match of the last tokens, from `shortest` to `longest` of them, and drafts what followed it.

    Of several such places the token that followed most often is drafted, as long as at least the share `least` of the
    places agrees with all drafts; at most `factor` times as many tokens as matched. The places are in the sequence's own text
    and, with `num_answers` above 0, in so many recent answers of requests that share cached blocks with it: drafts
    change what is computed when, so an answer could be guessed from the time that another one takes.
    """

    def __init__(
        self, shortest: int, longest: int, *, factor: float = inf, least: float = 0.0, num_answers: int = 0
    ) -> None:
        self._shortest, self._longest, self._factor, self._least = shortest, longest, factor, least
        self._num_answers = num_answers
        self._texts: dict[int, _Text] = {}  # by slot
        self._answers = OrderedDict[bytes, _Answers]()  # by the name that blocks of their prompts begin with

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        """See Drafter; a sequence whose end occurs nowhere else gets no drafts."""
        if self._num_answers and plan.rows:
            self._begin(plan, slices)
        drafts = {}
        for index, num_drafts in plan.drafts:
            piece = slices[index]
            text = self._texts.get(piece.slot)
            if text is None or text.seq_id != piece.seq_id:
                text = self._texts[piece.slot] = _Text(piece.seq_id, piece.num_prompt, piece.tokens)
            text.known = piece.tokens
            found = self._continuation(text, num_drafts)
            if found:
                drafts[index] = found
        return drafts

    def _begin(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> None:
        """Note which rows begin, and keep the answers of those whose slots they take."""
        pieces = {piece.slot: piece for piece in slices}
        for row in plan.rows:
            old = self._texts.get(row.slot)
            if old is not None and old.seq_id != row.seq_id:
                self._keep(old)
                del self._texts[row.slot]
            if row.slot in pieces:
                piece = pieces[row.slot]
                self._texts[row.slot] = _Text(row.seq_id, row.num_prompt, piece.tokens, row.root)

    def _keep(self, text: _Text) -> None:
        """Add the answer to the recent ones; a text without a root is shared with none."""
        answer = text.catch_up()[text.num_prompt :]
        if text.root and len(answer):
            self._answers.setdefault(text.root, _Answers(self._num_answers)).add(answer)
            self._answers.move_to_end(text.root)
            if len(self._answers) > _MAX_ROOTS:
                self._answers.popitem(last=False)

    def _continuation(self, text: _Text, num_drafts: int) -> list[int]:
        shared = self._answers.get(text.root)
        texts = [text.catch_up()] if shared is None else [shared.tokens, text.catch_up()]
        return continuation(texts, self._shortest, self._longest, num_drafts, self._factor, self._least)

    def forget(self, blocks: Sequence[int]) -> None:
        """Texts have no blocks."""

    def close(self) -> None:
        """Forget all texts."""
        self._texts.clear()
        self._answers.clear()


def continuation(
    texts: Sequence[Ids], shortest: int, longest: int, num_tokens: int, factor: float = inf, least: float = 0.0
) -> list[int]:
    """Return the tokens that followed the longest match of the last text's end, in any of the texts; see TextDrafter.

    Returns [] if there is none. If fewer than `num_tokens` follow a place in the last text, it is continued as a period.
    """
    own = texts[-1]
    longest = min(longest, len(own) - 1)
    if longest < shortest:
        return []
    end = own[-longest:][::-1]
    found = [_matches(text[:-1], end) for text in texts]
    size = max([int(sizes.max()) for _, sizes in found if len(sizes)], default=0)
    if size < shortest:
        return []
    ahead = np.arange(min(num_tokens, max(int(min(size * factor, num_tokens)), 1)))
    rows = []
    for text, (places, sizes) in zip(texts, found, strict=True):
        follows = places[sizes == size][:, None] + 1
        at = follows + ahead % (len(text) - follows) if text is own else np.minimum(follows + ahead, len(text) - 1)
        rows.append(text[at])
    return _most_frequent(np.concatenate(rows), least)


def _matches(text: Ids, end: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where tokens of a text equal the first of `end`, and how many agree there, going backwards.

    Of many places those with fewer matching tokens are left out, then all but the latest.
    """
    places = np.flatnonzero(text == end[0])
    for back in range(1, len(end)):
        if len(places) <= _MAX_PLACES:
            break
        fewer = places[(places >= back) & (text[places - back] == end[back])]
        if not len(fewer):
            break
        places = fewer
    places = places[-_MAX_PLACES:]
    before = places[:, None] - np.arange(len(end))
    differs = (text[np.maximum(before, 0)] != end) | (before < 0)
    return places, np.where(differs.any(axis=1), differs.argmax(axis=1), len(end))


def _most_frequent(rows: Ids, least: float) -> list[int]:
    """Return the most frequent beginning of the rows, token by token, as far as the share `least` of them has it.

    Of tokens that are as frequent, the one in the last row counts.
    """
    drafts: list[int] = []
    num_needed = max(least * len(rows), 1)
    for place in range(rows.shape[1]):
        column = rows[:, place]
        if (column != column[-1]).any():
            ids, counts = np.unique(column, return_counts=True)
            frequent = ids[counts == counts.max()]
            chosen = column == column[np.isin(column, frequent)][-1]
            rows, column = rows[chosen], column[chosen]
        if column[-1] == _END or len(rows) < num_needed:
            break
        drafts.append(int(column[-1]))
    return drafts
