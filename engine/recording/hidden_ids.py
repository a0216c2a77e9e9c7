"""Replaces token ids by positions in a tree of sequences, and back.

A recording of lengths must not contain token ids, but the prefix cache compares them. The recorder walks a TokenTree of
the real ids and writes down the steps it takes: "follow child 2", "add a child". The replay takes the same steps in a
second tree, whose invented ids are equal where the real ones are; nothing else of an id can be read from the steps.
Used by one thread at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_TOKENS = 1 << 23  # in a tree, 8 bytes each: more is not recorded
_FIRST_ID = 1 << 20  # of invented ids, clear of the small ones that end an answer

Step = int  # 0: the leaf grows by a token; n > 0: follow child n - 1; -1: add a child
Prompt = list[int]  # number of a node, tokens up to there, a Step, tokens in all; without a Step, all are in the tree


class TreeFullError(Exception):
    """The tree holds MAX_TOKENS."""


class _Node:
    """A run of tokens that every sequence through here has."""

    __slots__ = ("children", "index", "number", "parent", "start", "tokens")

    def __init__(self, number: int, index: int, parent: _Node | None, start: int, tokens: array[int]) -> None:
        self.number, self.index, self.parent, self.start, self.tokens = number, index, parent, start, tokens
        self.children: dict[int, _Node] = {}  # by their first tokens

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class TokenTree:
    """hide_* turn ids into steps, show_* turn steps into invented ids."""

    def __init__(self) -> None:
        self._nodes = [_Node(0, 0, None, 0, array("q"))]
        self._nowhere = -1, -1, self._nodes[0]
        self._places: dict[int, tuple[int, int, _Node]] = {}  # by slot: seq_id, depth, node
        self._num_tokens = 0

    def hide_prompt(self, tokens: Sequence[int]) -> Prompt:
        """Return where a prompt leaves the tree, and add the rest of it. Raises TreeFullError."""
        node, depth = self._walk(tokens, len(tokens))
        number = node.number
        if depth == len(tokens):
            return [number, depth]
        node, step = self._follow(node, depth, tokens[depth])
        self._append(node, array("q", tokens[depth + 1 :]))
        return [number, depth, step, len(tokens)]

    def show_prompt(self, hidden: Prompt) -> list[int]:
        """Return the invented ids of a prompt."""
        number, depth, *rest = hidden
        node = self._nodes[number]
        tokens = self._path(node, depth)
        if rest:
            step, length = rest
            node, token = self._take(node, depth, step)
            new = array("q", [_FIRST_ID]) * (length - depth - 1)
            self._append(node, new)
            tokens += [token, *new]
        return tokens

    def hide_draw(self, slot: int, seq_id: int, tokens: Sequence[int], depth: int, token: int) -> Step:
        """Return the step from a sequence's first `depth` tokens to the next one.

        Raises TreeFullError. `slot` is the sequence's own, where the next draw is looked for first; -1 for an alternative,
        or a child's draw.
        """
        node, step = self._follow(self._locate(slot, seq_id, tokens, depth), depth, token)
        if slot >= 0:
            self._places[slot] = seq_id, depth + 1, node
        return step

    def show_draw(self, slot: int, seq_id: int, tokens: Sequence[int], depth: int, step: Step) -> int:
        """Return the invented id of a drawn token."""
        node, token = self._take(self._locate(slot, seq_id, tokens, depth), depth, step)
        if slot >= 0:
            self._places[slot] = seq_id, depth + 1, node
        return token

    def _locate(self, slot: int, seq_id: int, tokens: Sequence[int], depth: int) -> _Node:
        """Return the node in which a sequence's first `depth` tokens end.

        That is quick where the last draw of the slot led there.
        """
        known_id, known_depth, node = self._places.get(slot, self._nowhere)
        if known_id == seq_id and known_depth == depth:
            while node.parent is not None and depth <= node.start:  # it was split since
                node = node.parent
            return node
        node, found = self._walk(tokens, depth)
        assert found == depth, "a sequence has tokens that were not recorded"
        return node

    def _walk(self, tokens: Sequence[int], stop: int) -> tuple[_Node, int]:
        """Follow tokens as far as the tree has them; return the node and the depth."""
        node, depth = self._nodes[0], 0
        while depth < stop and depth == node.end:
            child = node.children.get(tokens[depth])
            if child is None:
                break
            node = child
            wanted = array("q", tokens[depth : min(stop, node.end)])
            depth += _num_common(node.tokens, wanted)
        return node, depth

    def _follow(self, node: _Node, depth: int, token: int) -> tuple[_Node, Step]:
        """Go on by a real token, adding it where it is new."""
        if depth < node.end:
            if node.tokens[depth - node.start] == token:
                return node, 1
            node = self._split(node, depth)
        child = node.children.get(token)
        if child is not None:
            return child, child.index + 1
        if not node.children and node.parent is not None:
            self._append(node, array("q", [token]))
            return node, 0
        return self._add_child(node, token), -1

    def _take(self, node: _Node, depth: int, step: Step) -> tuple[_Node, int]:
        """Go on by a recorded step; returns the token it leads over."""
        if depth < node.end:
            if step > 0:
                return node, node.tokens[depth - node.start]
            node = self._split(node, depth)
        if step == 0:
            self._append(node, array("q", [_FIRST_ID]))
            return node, _FIRST_ID
        token = _FIRST_ID + (step - 1 if step > 0 else len(node.children))
        return (node.children[token] if step > 0 else self._add_child(node, token)), token

    def _split(self, node: _Node, depth: int) -> _Node:
        """Return a new node of the tokens up to `depth`; the old one keeps the rest, as its first child."""
        assert node.parent is not None, "the root has no tokens"
        at = depth - node.start
        upper = _Node(len(self._nodes), node.index, node.parent, node.start, node.tokens[:at])
        node.parent.children[upper.tokens[0]] = upper
        node.index, node.parent, node.start, node.tokens = 0, upper, depth, node.tokens[at:]
        upper.children[node.tokens[0]] = node
        self._nodes.append(upper)
        return upper

    def _add_child(self, node: _Node, token: int) -> _Node:
        child = _Node(len(self._nodes), len(node.children), node, node.end, array("q"))
        self._append(child, array("q", [token]))
        node.children[token] = child
        self._nodes.append(child)
        return child

    def _append(self, node: _Node, tokens: array[int]) -> None:
        self._num_tokens += len(tokens)
        if self._num_tokens > MAX_TOKENS:
            raise TreeFullError
        node.tokens += tokens

    def _path(self, node: _Node, depth: int) -> list[int]:
        """Return the tokens from the root up to `depth` in a node."""
        runs = [node.tokens[: depth - node.start]]
        while node.parent is not None:
            node = node.parent
            runs.append(node.tokens)
        return [token for run in reversed(runs) for token in run]


def _num_common(one: array[int], other: array[int]) -> int:
    if one == other:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
