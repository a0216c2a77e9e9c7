"""Remembers the last prompts of each owner, and finds where a new one leaves them.

So a request can be told why the prefix cache gave it no more: the engine knows which positions it found, but no prompt that
is over. Prompts and their answers are kept as ids; `quote` makes text of them when that is asked for. Any thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from engine.text.chat.limits import num_common
from engine.text.message_fallbacks import message_heads
from engine.text.tokenizer import TextTokenizer

MAX_PROMPTS = 128  # of an owner
MAX_BYTES = 32 << 20  # of all
ID_BYTES = 4
_FIRST_BYTES = 256  # that are compared at a time, at first
_NUM_LIKE = 16  # tokens by which the rest of a prompt is found in another
_NUM_SHOWN = 16  # tokens around a place
_MAX_QUOTE = 40  # characters


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


def quote(tokenizer: TextTokenizer, fork: Fork) -> tuple[str, str]:
    """Return the word at which a prompt leaves an earlier one, and the word there; special tokens if only these differ."""
    for skip in (True, False):
        now, was = (tokenizer.decode(array("I", ids), skip_special_tokens=skip) for ids in (fork.now, fork.was))
        if now != was:
            break
    num = num_common(now, was)
    begin = max(now.rfind(space, 0, num) for space in " \n\t") + 1
    return _word(now, begin, num), _word(was, begin, num)


def role_at(tokenizer: TextTokenizer, prompt: RecentPrompt, num: int) -> str:
    """Return the role of the message at a place of a prompt, as the chat template writes it; "" if it is not known."""
    template = tokenizer.chat_template
    while prompt.heir is not None:
        prompt = prompt.heir
    text = tokenizer.decode(array("I", prompt.ids[: num * ID_BYTES]), skip_special_tokens=False)
    heads = {} if template is None else message_heads(template)
    found = [(text.rfind(head), len(head), role) for role, head in heads.items() if head in text]
    return max(found, default=(0, 0, ""))[2]


def _word(text: str, begin: int, num: int) -> str:
    """Return what surrounds a place of a text, up to the next spaces."""
    end = next((at for at in range(num + 1, len(text)) if text[at].isspace()), len(text))
    return text[max(begin, num - _MAX_QUOTE // 2) : min(end, num + _MAX_QUOTE // 2)]
