"""Remembers the ids of generated answers, and uses them where a prompt has the same text in the same place.

A client sends an answer back as text, which the tokenizer often encodes to other ids than those that were generated, and
there the prefix cache would end. So an answer is remembered under a digest of its owner and of all text up to its end.
Where a later prompt begins with this text, it gets these ids. What stands around them is encoded as it was then: a part
ends where a prompt ended, and begins with a mark that divides texts for the tokenizer. So the prompt's text stays the
same, and an answer that the template changes, as by leaving out thoughts, is not found. Any thread.

The last prompts of each owner are remembered, too, to find where a new one leaves them. So a request can be told why the
prefix cache gave it no more: the engine knows which positions it found, but no prompt that is over. Prompts and their answers
are kept as ids; server/telemetry/prefix_words.py makes text of them when that is asked for.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from math import inf
from threading import Lock
from typing import Any, NamedTuple

from engine.text.tokenizer import PROBE, TextTokenizer

Encode = Callable[[str], list[int]]
MAX_PROMPTS = 128  # of an owner
MAX_BYTES = 32 << 20  # of all
ID_BYTES = 4
_FIRST_BYTES = 256  # that are compared at a time, at first
_NUM_LIKE = 16  # tokens by which the rest of a prompt is found in another
_NUM_SHOWN = 16  # tokens around a place


class Owner(NamedTuple):
    """Who may see a prompt, and what keeps its cached K/V apart from that of other prompts of theirs."""

    name: str
    salt: str = ""
    adapter: str = ""


@dataclass(slots=True, eq=False)
class RecentPrompt:
    """A prompt, with what was computed of its answer once that has ended."""

    owner: Owner
    ids: bytes  # empty once they are forgotten
    num_prompt: int
    turn_end: int  # of these, those that the next turn's prompt has, too, whatever the answer
    is_answered: bool = False
    tag: str = ""  # the beginning of its request's id
    heir: RecentPrompt | None = None  # a later one that begins with all of it


class Fork(NamedTuple):
    """An earlier prompt, and what of it and its answer a new one begins with."""

    earlier: RecentPrompt
    num_common: int  # tokens
    num_reusable: int  # of these, the ones in whole blocks before the last token of the new prompt
    num_earlier: int  # tokens of the earlier prompt, and of its answer if that had ended
    was_answered: bool
    is_edit: bool  # the rest of the earlier prompt is in the new one, too
    now: bytes  # the ids around the place at which the new prompt leaves the earlier one ...
    was: bytes  # ... and those of the earlier one


class Forks(NamedTuple):
    """The longest fork of an earlier prompt whose K/V a new one may use, and of one that is kept apart."""

    own: Fork | None
    other: Fork | None


class RecentPrompts:
    """The last prompts. Beyond a bound, the oldest are forgotten, and one whose answer has come back in the next."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._of: dict[str, deque[RecentPrompt]] = {}  # by the owner's name, oldest first
        self._order: dict[RecentPrompt, None] = {}
        self._num_bytes = 0
        self._lock = Lock()

    def compare(self, owner: Owner, ids: Sequence[int]) -> tuple[RecentPrompt, Forks]:
        """Return a prompt, which `add` remembers once the engine has taken it, and where it leaves earlier ones."""
        prompt = RecentPrompt(owner, array("I", ids).tobytes(), len(ids), len(ids))
        with self._lock:
            earlier = [*self._of.get(owner.name, ())]
        own = self._longest(prompt, [each for each in earlier if each.owner == owner])
        other = self._longest(prompt, [each for each in earlier if each.owner != owner])
        return prompt, Forks(own, other)

    def add(self, prompt: RecentPrompt, own: Fork | None) -> None:
        """Remember a prompt, which leaves an earlier one with the same owner so."""
        with self._lock:
            if own is not None and own.was_answered and own.num_common >= own.num_earlier:
                self._forget(own.earlier)
                own.earlier.heir = prompt
            self._order[prompt] = None
            self._of.setdefault(prompt.owner.name, deque()).append(prompt)
            self._grow(len(prompt.ids), prompt.owner.name)

    def answer(self, prompt: RecentPrompt, ids: Sequence[int]) -> None:
        """Add an answer to its prompt; of several, the first."""
        with self._lock:
            if not prompt.is_answered and prompt in self._order:
                prompt.ids += array("I", ids).tobytes()
                self._grow(ID_BYTES * len(ids), prompt.owner.name)
            prompt.is_answered = True

    def _grow(self, num_bytes: int, name: str) -> None:
        """Count bytes that were added, and forget prompts beyond the bounds."""
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_BYTES:
            self._forget(next(iter(self._order)))
        if len(self._of.get(name, ())) > MAX_PROMPTS:
            self._forget(self._of[name][0])

    def _forget(self, prompt: RecentPrompt) -> None:
        """Forget a prompt, if it is remembered."""
        if prompt not in self._order:
            return
        prompts = self._of[prompt.owner.name]
        prompts.remove(prompt)
        if not prompts:
            del self._of[prompt.owner.name]
        del self._order[prompt]
        self._num_bytes -= len(prompt.ids)
        prompt.ids = b""

    def _longest(self, prompt: RecentPrompt, others: Sequence[RecentPrompt]) -> Fork | None:
        """Return the longest fork, if any.

        Conversations that begin alike part at nearly the same place; the one that the prompt is of has its rest there, too.
        """
        ids = prompt.ids
        found, longest, at, some = list[tuple[int, RecentPrompt]](), (0, prompt), 0, ids[:ID_BYTES]
        for other in reversed(others):  # mostly the last ones are of the same conversation
            if other.ids[at : at + ID_BYTES] != some:  # what they have in common is shorter by more than a block
                continue
            found.append((_num_common(ids, other.ids), other))
            if found[-1][0] > longest[0]:
                longest, at = found[-1], ID_BYTES * max(found[-1][0] - self.block_size, 0)
                some = ids[at : at + ID_BYTES]
        if not longest[0]:
            return None
        is_whole, least = longest[0] >= longest[1].turn_end, longest[0] - self.block_size
        near = [] if is_whole else [each for each in found if each[0] > least]
        edited = next((each for each in near if _has_rest(ids, *each)), None)
        num, other = edited or longest
        num_reusable = min(longest[0], prompt.num_prompt - 1) // self.block_size * self.block_size
        num_other = max(len(other.ids) // ID_BYTES, num)
        around = slice(ID_BYTES * max(num - _NUM_SHOWN, 0), ID_BYTES * (num + _NUM_SHOWN))
        shown = ids[around], other.ids[around]
        return Fork(other, num, num_reusable, num_other, other.is_answered, edited is not None, *shown)


def _num_common(one: bytes, other: bytes) -> int:
    """Return how many ids two prompts begin with."""
    at, step, end = 0, _FIRST_BYTES, min(len(one), len(other))
    while at < end and one[at : at + step] == other[at : at + step]:
        at, step = at + step, 2 * step
    # The lowest bit of this is in the first byte that differs, or behind the end of the shorter prompt.
    unequal = int.from_bytes(one[at : at + step], "little") ^ int.from_bytes(other[at : at + step], "little")
    return min(at + ((unequal & -unequal).bit_length() - 1) // 8, end) // ID_BYTES if unequal else end // ID_BYTES


def _has_rest(ids: bytes, num: int, other: RecentPrompt) -> bool:
    """Return whether what follows the first tokens in another prompt comes later in this one.

    Looked for are its last tokens, without those that open the answer.
    """
    start = other.turn_end - _NUM_LIKE
    rest = other.ids[start * ID_BYTES : (start + _NUM_LIKE) * ID_BYTES]
    return start > num and bool(rest) and ids.find(rest, num * ID_BYTES) >= 0


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

    def remember(self, ids: Sequence[int], *, has_end: bool, num_cut: int = 0) -> None:
        """Remember an answer, whose last token may be its end, and whose last characters a stop string may have cut."""
        if self.place is not None:
            self.history.remember(self.place, ids[:-1] if has_end else ids, num_cut)
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

    def remember(self, place: AnswerPlace, ids: Sequence[int], num_cut: int = 0) -> None:
        """Remember the ids of an answer, without the token that ended it, and without so many characters at its end."""

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode([*place.before, *ids], skip_special_tokens=False)

        before, text = decode(()), decode(ids)
        if num_cut:  # the last token that is shown may be cut in two
            text, first = text[:-num_cut], max(len(ids) - 4 * num_cut - 4, 0)  # a character is of 4 ids at most
            num = bisect_right(range(len(ids)), len(text), first, key=lambda num: len(decode(ids[:num]))) - 1
            ids = [*ids[:num], *self._encode(text[len(decode(ids[:num])) :])]
            if decode(ids) != text:
                return
        if text == before or not text.startswith(
            before
        ):  # ids that are no text would be found behind the prompt itself
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
