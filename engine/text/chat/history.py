"""Remembers the ids of generated answers, and uses them where a prompt has the same text in the same place.

A client sends an answer back as text, which the tokenizer often encodes to other ids than those that were generated, and
there the prefix cache would end. So an answer is remembered under a digest of its owner and of all text up to its end.
Where a later prompt begins with this text, it gets these ids. What stands around them is encoded as it was then: a part
ends where a prompt ended, and begins with a mark that divides texts for the tokenizer. So the prompt's text stays the
same, and an answer that the template changes, as by leaving out thoughts, is not found. Any thread.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from math import inf
from threading import Lock
from typing import Any, NamedTuple

from engine.text.chat.prefixes import Forks, Owner, RecentPrompt, RecentPrompts
from engine.text.tokenizer import PROBE, TextTokenizer

Encode = Callable[[str], list[int]]

MAX_IDS = 16 << 20  # of all answers, 4 bytes each
_MAX_MARKS = 10_000  # of a prompt, before which an answer may end
_NUM_CONTEXT = 8  # ids before an answer: enough to decode its first one


class _Answer(NamedTuple):
    """An answer, by the digest of the text up to its end."""

    start: int  # where it begins in this text
    ids: array[int]


class AnswerPlace(NamedTuple):
    """The end of a prompt, where an answer begins."""

    digest: Any  # the hash of the text before it, to be continued
    before: Sequence[int]  # the last ids before it
    begun: _Answer  # the answer that it continues; empty if none is known
    num_found: int  # earlier answers


@dataclass(slots=True)
class HistoryCounts:
    """Earlier answers in the prompts of requests, and those of them whose ids were used."""

    num_sought: int = 0
    num_used: int = 0


@dataclass(slots=True, eq=False)
class ChatTurn:
    """A prompt that was made, of a conversation or not, whose answer is to be remembered."""

    history: AnswerHistory
    place: AnswerPlace | None  # of a conversation's answer; None where no text is sent back
    prompt: RecentPrompt
    forks: Forks  # where it leaves earlier prompts

    def begin(self, tag: str) -> None:
        """Remember the prompt, by the beginning of its request's id: the engine has taken it."""
        self.prompt.tag = tag
        self.history.prompts.add(self.prompt, self.forks.own)

    def remember(self, ids: Sequence[int], *, has_end: bool) -> None:
        """Remember an answer, whose last token may be its end."""
        if self.place is not None:
            self.history.remember(self.place, ids[:-1] if has_end else ids)
        self.history.prompts.answer(self.prompt, ids[:-1])  # the last one is never computed


class AnswerHistory:
    """The last answers; beyond a bound, those that were used least recently are forgotten."""

    def __init__(self, tokenizer: TextTokenizer, max_answers: int, block_size: int) -> None:
        """Of prompts, so many tokens are reused together."""
        self._tokenizer, self._max_answers = tokenizer, max_answers
        source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        ends, special = tokenizer.eos_token_ids, tokenizer.special_tokens
        known = [mark for mark, token_id in special.items() if token_id in ends or mark in source]
        marks = sorted(filter(self._is_divider, known), reverse=True)  # of two that begin alike the longer one first
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._num_ids = 0
        self._lock = Lock()
        self.counts, self.prompts = HistoryCounts(), RecentPrompts(block_size)

    def begin(
        self, owner: Owner, text: str, num_sought: int, encode: Encode | None = None
    ) -> tuple[list[int], ChatTurn]:
        """Return the ids of a prompt that has so many earlier answers, and the turn that it begins. Raises as `encode`."""
        ids, place = self.encode(owner, text, encode)
        with self._lock:
            self.counts.num_sought += num_sought
            self.counts.num_used += min(place.num_found, num_sought)
        return ids, ChatTurn(self, place, *self.prompts.compare(owner, ids))

    def follow(self, owner: Owner, ids: Sequence[int]) -> ChatTurn:
        """Return the turn of a prompt that is taken as these ids, and not as a conversation's text."""
        return ChatTurn(self, None, *self.prompts.compare(owner, ids))

    def encode(self, owner: Owner, text: str, encode: Encode | None = None) -> tuple[list[int], AnswerPlace]:
        """Return the ids of a prompt, and the place of the answer to it. Raises InvalidRequestError.

        `encode` returns the ids of what stands between answers, instead of the tokenizer.
        """
        encode = encode or self._encode
        whose = blake2b("\0".join(owner).encode("utf-8", "surrogatepass")).digest()
        digest, done = blake2b(whose, digest_size=32), 0
        names = dict[bytes, int]()  # with the place in the text up to which each is the digest
        for end in (*[mark.start() for mark in islice(self._marks.finditer(text), _MAX_MARKS)], len(text)):
            digest.update(text[done:end].encode("utf-8", "surrogatepass"))
            names[digest.digest()] = done = end
        found, ids, done = self._find(names), list[int](), 0
        for end, answer in found:
            ids += encode(text[done : answer.start])
            ids += answer.ids
            done = end
        ids += encode(text[done:])
        is_continued = bool(found) and done == len(text)
        begun = found[-1][1] if is_continued else _Answer(len(text), array("I"))
        return ids, AnswerPlace(digest, ids[-_NUM_CONTEXT:], begun, len(found))

    def remember(self, place: AnswerPlace, ids: Sequence[int]) -> None:
        """Remember the ids of an answer, without the token that ended it."""
        decode = self._tokenizer.decode
        before = decode(place.before, skip_special_tokens=False)
        text = decode([*place.before, *ids], skip_special_tokens=False)
        if not ids or not text.startswith(before):
            return
        digest, answer = place.digest.copy(), _Answer(place.begun.start, place.begun.ids + array("I", ids))
        digest.update(text[len(before) :].encode("utf-8", "surrogatepass"))
        name = digest.digest()
        with self._lock:
            if name in self._answers:  # in other ids, which conversations have had so far
                return
            self._answers[name] = answer
            self._num_ids += len(answer.ids)
            while len(self._answers) > self._max_answers or self._num_ids > MAX_IDS:
                self._num_ids -= len(self._answers.popitem(last=False)[1].ids)

    def _find(self, names: Mapping[bytes, int]) -> list[tuple[int, _Answer]]:
        """Return the answers of some names, in the order of their ends; one that is part of a longer one is left out."""
        found, stop = list[tuple[int, _Answer]](), inf
        with self._lock:
            for name, end in reversed([*names.items()]):
                answer = self._answers.get(name)
                if answer is not None and end <= stop:
                    self._answers.move_to_end(name)
                    found.append((end, answer))
                    stop = answer.start
        return found[::-1]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _is_divider(self, mark: str) -> bool:
        """Return whether the ids of what stands before and behind a mark do not depend on each other."""
        return self._encode(PROBE + mark + PROBE) == self._encode(PROBE) + self._encode(mark + PROBE)
