"""Turns logits into token ids: one batch of rows, each with its own parameters.

The order is OpenAI's and vLLM's: allowed_token_ids, logit_bias, bad_words and min_tokens, penalties, temperature,
min_p, top_k, top_p, then the draw. Grammar masks (constraint.py, which alone may wait for the previous step) come
before it, where their position does not matter. Rows without any of these cost one argmax. On CUDA masks and penalties
are kernels (cuda/mask.py, cuda/token_counts.py and cuda/sampling.py); all else is torch operations. Nothing else waits
for a GPU. Engine thread.

For penalties each slot keeps its sequence's ids in one growing tensor, extended by the few new ones at each step, and cleared
when another sequence takes the slot. An id that the host does not know yet (overlap) is read from `last_ids` on the device.
Only tokens that occurred are touched, never a vocabulary-sized table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.step import Resources, Sample
from engine.core.types import Grammar, SamplingParams, TokenLogprob
from engine.runtime.cuda.available import uses_triton
from engine.runtime.sampling.constraint import Constrained, ConstrainedStep, Constraints, apply_masks, pack_mask
from engine.runtime.sampling.draw import draw
from engine.runtime.sampling.wish import Wish
from engine.runtime.transfer import Drawn, to_device

if TYPE_CHECKING:
    from engine.runtime.cuda.sampling import Penalties  # imports Triton, which a CPU-only machine may lack
    from engine.runtime.cuda.token_counts import TokenCounts


@dataclass(slots=True)
class _Slot:
    seq_id: int
    ids: Tensor
    length: int = 0


class History:
    """The ids of penalised sequences, by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def ids(self, piece: SequenceSlice, last_ids: Tensor) -> Tensor:
        """Return the sequence's ids up to the slice's end, [start + num_tokens] int64."""
        stop = piece.start + piece.num_tokens
        slot = self._slots.get(piece.slot)
        if slot is None or slot.seq_id != piece.seq_id:
            slot = self._slots[piece.slot] = _Slot(piece.seq_id, last_ids.new_empty(0))
        if stop > slot.ids.shape[0]:
            slot.ids = torch.cat([slot.ids, slot.ids.new_empty(stop)])  # at least doubles
        known = min(len(piece.tokens), stop)
        slot.length = min(slot.length, piece.start)  # entries from here on may have been drafts
        if slot.length < known:
            slot.ids[slot.length : known] = to_device(piece.tokens[slot.length : known], torch.int64, last_ids.device)
        if known < stop:
            slot.ids[known:stop] = last_ids[piece.slot]
        slot.length = stop
        return slot.ids[:stop]


class Penalized(NamedTuple):
    """One row of logits to penalise."""

    row: int
    params: SamplingParams
    ids: Tensor  # prompt and generated
    num_prompt: int


def apply_penalties(logits: Tensor, rows: Sequence[Penalized]) -> None:
    """Penalise logits [R, V] in place: repetition first, then frequency and presence."""
    flat = logits.view(-1)
    repeated = [r for r in rows if r.params.repetition_penalty != 1.0]
    if repeated:
        at = _places(repeated, [r.ids for r in repeated], logits.shape[1])
        factor = _spread([r.params.repetition_penalty for r in repeated], [r.ids for r in repeated], logits)
        values = flat[at]
        # A token that occurs twice is written twice with the same value.
        flat[at] = torch.where(values > 0, values / factor, values * factor)
    counted = [r for r in rows if r.params.frequency_penalty != 0.0 or r.params.presence_penalty != 0.0]
    if counted:
        answers = [r.ids[r.num_prompt :] for r in counted]
        at = _places(counted, answers, logits.shape[1])
        flat.index_add_(0, at, -_spread([r.params.frequency_penalty for r in counted], answers, logits))
        flat[at] = flat[at] - _spread([r.params.presence_penalty for r in counted], answers, logits)


def _places(rows: Sequence[Penalized], ids: Sequence[Tensor], vocab_size: int) -> Tensor:
    return torch.cat([each + row.row * vocab_size for row, each in zip(rows, ids, strict=True)])


def _spread(values: Sequence[float], ids: Sequence[Tensor], like: Tensor) -> Tensor:
    """Repeat each row's value for each of its ids."""
    return torch.cat([like.new_full(each.shape, value) for value, each in zip(values, ids, strict=True)])


class Logprobs(NamedTuple):
    """For R rows: the chosen token's, and the k best, best first."""

    chosen: Tensor  # [R] int64
    values: Tensor  # [R] float32
    ranks: Tensor  # [R] int64, from 1
    top_ids: Tensor  # [R, k] int64
    top_values: Tensor  # [R, k] float32

    def to_types(self, num_top: Sequence[int]) -> list[TokenLogprob]:
        """Return plain numbers, `num_top[r]` alternatives for row r; tensors on the host."""
        columns = zip(*(tensor.tolist() for tensor in self), num_top, strict=True)
        return [
            TokenLogprob(chosen, value, rank, tuple(zip(ids[:num], values[:num], strict=True)))
            for chosen, value, rank, ids, values, num in columns
        ]


def gather_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> Logprobs:
    """Return the log probabilities of logits [R, V] float32 for chosen [R] int64."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values = logprobs.gather(-1, chosen[:, None])
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    ranks = (logprobs > values).sum(-1) + 1
    return Logprobs(chosen, values[:, 0], ranks, top.indices, top.values)


class Sampled(NamedTuple):
    """The ids drawn for R rows, on the device."""

    ids: Tensor  # [R] int64
    is_finite: Tensor  # [R] bool; False if the logits were not finite, which makes the id void
    logprobs: Logprobs | None  # for `logprob_rows` alone
    logprob_rows: Sequence[int]
    constrained: ConstrainedStep | None = None


class _Ban(NamedTuple):
    """A banned token of a row: always, or if `slot` drew the token `drawn` last, which the host may not know yet."""

    row: int
    token: int
    slot: int = 0
    drawn: int = -1


class _Row(NamedTuple):
    place: int  # in the step's ids
    at: int  # its row in the logits; the same index unless only some rows are drawn
    piece: SequenceSlice
    sample: Sample
    params: SamplingParams
    position: int  # the drawn token's position


class Sampler:
    """Draws a plan's samples; keeps penalty histories, token masks and matchers."""

    def __init__(self, device: torch.device, resources: Resources | None = None) -> None:
        """`resources` has the grammars that plans name."""
        self._device, self._resources = device, resources
        self._history = History()
        self._constraints: Constraints | None = None  # from the first row with a grammar on
        # By slot: the sequence, and the mask of its allowed_token_ids.
        self._masks: dict[int, tuple[int, NDArray[np.int32]]] = {}
        self._counts: TokenCounts | None = None  # replaces the history on CUDA, from the first penalty on

    def sample(
        self, slices: Sequence[SequenceSlice], logits: Tensor, last_ids: Tensor, drawn: Drawn | None = None
    ) -> Sampled:
        """Draw a token for every sample and after every draft, in the order of the slices.

        logits [R, V] float32 are overwritten. `last_ids` [slots] int64 is read for ids not yet known to the host, then
        holds the new ones. If `drawn` has ids drawn from the raw logits, only rows that are not plain are drawn again,
        and `drawn` is changed in place.
        """
        rows = _rows(slices)
        if drawn is not None:
            rows = [row._replace(at=at) for at, row in enumerate(row for row in rows if not is_plain(row.piece))]
            logits = logits.index_select(0, self._long([row.place for row in rows]))
        asking = [row for row in rows if row.params.logprobs is not None]
        raw = logits.index_select(0, self._long([row.at for row in asking])) if asking else None

        edited = [row for row in rows if _is_edited(row.piece)]
        penalties = None
        if edited:
            self._keep_allowed(logits, edited)
            self._edit(logits, edited, last_ids)
            # Its counts are of one text for each slot.
            if uses_triton(logits) and not any(piece.drafts for piece in slices):
                penalties = self._count(logits, edited, last_ids)
            else:
                self._penalise(logits, edited, last_ids)
        constrained = self._constrain(logits, [row for row in rows if row.params.grammar is not None])
        ids, is_finite = draw(logits, [_wish(row) for row in rows], penalties, last_ids)
        if drawn is not None:
            places = self._long([row.place for row in rows])
            ids, is_finite = drawn.ids.index_copy_(0, places, ids), drawn.is_finite.index_copy_(0, places, is_finite)

        if raw is None:
            return Sampled(ids, is_finite, None, (), constrained)
        indices = [row.place for row in asking]
        most = max(row.params.logprobs or 0 for row in asking)
        logprobs = gather_logprobs(raw, ids[self._long(indices)], most)
        return Sampled(ids, is_finite, logprobs, indices, constrained)

    def count_allowed(self, piece: SequenceSlice, drafts: Sequence[int]) -> int:
        """Return how many of a slice's drafts its grammar accepts; all without one."""
        if piece.params.grammar is None:
            return len(drafts)
        constraints, grammar = self._constraints or Constraints(), self._grammar(piece.sampling)
        self._constraints = constraints
        return constraints.count_allowed(Constrained(0, 0, piece.samples[0].slot, piece, grammar), drafts)

    def _grammar(self, params: SamplingParams) -> Grammar:
        assert self._resources is not None, "only what has resources names a grammar"
        assert params.grammar is not None
        return self._resources.find(params.grammar)

    def _constrain(self, logits: Tensor, rows: Sequence[_Row]) -> ConstrainedStep | None:
        """Mask the tokens that grammars forbid, in place."""
        if not rows and self._constraints is None:
            return None
        self._constraints = self._constraints or Constraints()
        return self._constraints.apply(logits, [_constrained(row, self._grammar(row.params)) for row in rows])

    def _keep_allowed(self, logits: Tensor, rows: Iterable[_Row]) -> None:
        """Mask all but a row's allowed tokens, in place."""
        masks = {row.at: self._mask(row, logits.shape[1]) for row in rows if row.params.allowed_token_ids is not None}
        if masks:
            apply_masks(logits, masks, np.stack(list(masks.values())))

    def _mask(self, row: _Row, vocab_size: int) -> NDArray[np.int32]:
        """Return a row's mask of allowed tokens, packed once for each sequence."""
        allowed, slot, seq_id = row.params.allowed_token_ids, row.sample.slot, row.piece.seq_id
        assert allowed is not None
        if slot not in self._masks or self._masks[slot][0] != seq_id:
            self._masks[slot] = seq_id, pack_mask(allowed, vocab_size)
        return self._masks[slot][1]

    def _edit(self, logits: Tensor, rows: Sequence[_Row], last_ids: Tensor) -> None:
        """Edit the logits of single tokens, in place."""
        vocab_size = logits.shape[1]
        flat = logits.view(-1)
        biases = [(row.at * vocab_size + token, bias) for row in rows for token, bias in row.params.logit_bias]
        if biases:
            places, values = zip(*biases, strict=True)
            flat.index_add_(0, self._long(places), self._float(values))
        bans = list(_bans(rows, vocab_size))
        if bans:
            at = self._long([ban.row * vocab_size + ban.token for ban in bans])
            drawn, slots = self._long([ban.drawn for ban in bans]), self._long([ban.slot for ban in bans])
            is_hit = (drawn < 0) | (last_ids[slots] == drawn)
            # A minimum, because a token may be banned by several entries of which one applies.
            flat.scatter_reduce_(0, at, torch.where(is_hit, -torch.inf, torch.inf), "amin")

    def _penalise(self, logits: Tensor, rows: Sequence[_Row], last_ids: Tensor) -> None:
        """Apply penalties, in place."""
        penalized = [
            Penalized(row.at, row.params, self._history.ids(row.piece, last_ids), row.piece.num_prompt)
            for row in rows
            if row.params.is_penalized
        ]
        if penalized:
            apply_penalties(logits, penalized)

    def _count(self, logits: Tensor, rows: Sequence[_Row], last_ids: Tensor) -> Penalties | None:
        """Return the penalties for the kernels of the draw."""
        from engine.runtime.cuda.token_counts import TokenCounts

        num_rows, vocab_size = logits.shape
        penalized = [(row.at, row.piece) for row in rows if row.params.is_penalized]
        if not penalized:
            return None
        if self._counts is None:
            self._counts = TokenCounts(len(last_ids), vocab_size, logits.device)
        return self._counts.penalties(penalized, num_rows, last_ids)

    def _long(self, values: Sequence[int]) -> Tensor:
        return to_device(values, torch.int64, self._device)

    def _float(self, values: Sequence[float]) -> Tensor:
        return to_device(values, torch.float32, self._device)


def wishes(slices: Iterable[SequenceSlice]) -> list[Wish]:
    """Return how the samples of slices are drawn from unedited logits."""
    return [_wish(row) for row in _rows(slices)]


def _rows(slices: Iterable[SequenceSlice]) -> list[_Row]:
    pairs = [(piece, sample) for piece in _one_by_one(slices) for sample in piece.samples]
    return [
        _Row(place, place, piece, sample, piece.sampling, piece.start + piece.num_tokens)
        for place, (piece, sample) in enumerate(pairs)
    ]


def is_plain(piece: SequenceSlice) -> bool:
    """Return whether a draw needs only logits, temperature, filters and noise."""
    params = piece.params
    asks_more = params.logprobs is not None or params.grammar is not None
    return not asks_more and not _is_edited(piece)


def _is_edited(piece: SequenceSlice) -> bool:
    """Return whether logits of single tokens may change before the draw."""
    return piece.sampling.edits_tokens or piece.sampling.is_penalized or bool(_too_early(piece))


def _constrained(row: _Row, grammar: Grammar) -> Constrained:
    """Return the constrained row; below min_tokens, ending is the last resort."""
    params = row.params
    unwanted: frozenset[int] = frozenset()
    if _is_too_short(row.piece):
        unwanted = grammar.end_ids | params.stop_token_ids
    elif not params.eos_token_ids:
        unwanted = grammar.end_ids
    return Constrained(row.place, row.at, row.sample.slot, row.piece, grammar, unwanted)


def _wish(row: _Row) -> Wish:
    params, (slot, seed) = row.params, row.sample
    return Wish(params.temperature, params.top_k, params.top_p, params.min_p, seed, row.position, slot)


def _bans(rows: Iterable[_Row], vocab_size: int) -> Iterator[_Ban]:
    for row in rows:
        yield from (_Ban(row.at, token) for token in _too_early(row.piece) if token < vocab_size)
        yield from (ban for ban in _bad_endings(row.at, row.piece) if ban.token < vocab_size)


def _bad_endings(row: int, piece: SequenceSlice) -> Iterator[_Ban]:
    """Yield the bans of a slice whose answer may end with the start of a bad word."""
    position = piece.start + piece.num_tokens
    for word in piece.sampling.bad_words:
        begin, num_before = position - len(word) + 1, len(word) - 1
        if begin < piece.num_prompt:
            continue  # the prompt is not part of the answer
        known = piece.tokens[begin:position] if num_before else ()
        if tuple(known) != word[: len(known)]:
            continue
        yield _Ban(row, word[-1]) if len(known) == num_before else _Ban(row, word[-1], piece.slot, word[-2])


def _too_early(piece: SequenceSlice) -> frozenset[int]:
    """Return tokens that would end it before min_tokens; grammars mask theirs."""
    params = piece.params
    if params.grammar is not None or not _is_too_short(piece):
        return frozenset()
    return params.eos_token_ids | params.stop_token_ids


def _is_too_short(piece: SequenceSlice) -> bool:
    return piece.start + piece.num_tokens - piece.num_prompt < piece.sampling.min_tokens


def _one_by_one(slices: Iterable[SequenceSlice]) -> Iterator[SequenceSlice]:
    """Split slices with drafts into one slice for each draw; others are unchanged."""
    for piece in slices:
        if not piece.drafts:
            yield piece
            continue
        num_certain = piece.num_tokens - len(piece.drafts)
        row = piece._replace(tokens=[*piece.tokens, *piece.drafts], num_tokens=num_certain, drafts=())
        yield row
        for position in range(row.start + num_certain, piece.start + piece.num_tokens):
            yield row.at(position)
