"""Images in a runner: vectors that are kept, and the rows whose prompts have them. Engine thread.

A row's positions are computed from its spans when it begins, so that they hold whatever of it was cached, swapped or
preempted. A step without such rows asks nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.spans import Span
from engine.core.step import Resources, RowStart
from engine.images import Image
from engine.runtime.execution.pieces import Pieces
from engine.runtime.native.decoder import Vectors
from engine.runtime.transfer import to_device

# An image to its vectors [1 + D, V, hidden] on the device; None if it cannot be computed.
Embed = Callable[[Image], Tensor | None]


class _Row(NamedTuple):
    """A row with images."""

    spans: tuple[Span, ...]
    places: tuple[NDArray[np.int64], ...]  # by span: the positions of the prompt that its vectors have
    positions: NDArray[np.int64] | None  # [3, positions of the prompt]; None: those of text
    delta: int  # what is added to a later token's index

    def at(self, start: int, num: int) -> NDArray[np.int64]:
        """Return the positions [3, num] of tokens, of which those behind the prompt have one for all axes."""
        assert self.positions is not None
        found = np.tile(np.arange(start, start + num) + self.delta, (3, 1))
        known = self.positions[:, start : start + num]
        found[:, : known.shape[1]] = known
        return found


class ImageInputs(NamedTuple):
    """What images make of a step, as far as it differs from text."""

    vectors: Vectors | None
    positions: Tensor | None  # [3, T]
    ends: Tensor | None  # [T], as in a Batch
    failed: list[int]  # slices with an image that cannot be computed: what they compute is void


class ImageRows:
    """The rows with images, by slot; those that have ended are there until another one takes the slot."""

    def __init__(self, embed: Embed, resources: Resources, device: torch.device, max_rows: int) -> None:
        self._embed, self._resources, self._device = embed, resources, device
        self.rows: dict[int, _Row] = {}  # without any, a step asks no more
        # By slot, on the device: what is added to the index of a token behind the prompt's images.
        self.deltas = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def follow(self, rows: Sequence[RowStart]) -> None:
        """Begin rows."""
        changed = dict[int, int]()
        for row in rows:
            if self.rows.pop(row.slot, None) is not None:
                changed[row.slot] = 0
            if row.spans:
                grids = [self._image(span).grid for span in row.spans]
                positions, delta = _positions(row.num_prompt, row.spans, grids)
                places = tuple([_places(row.ids, span) for span in row.spans])
                self.rows[row.slot] = _Row(row.spans, places, positions, delta)
                changed[row.slot] = delta
        if changed:
            slots, deltas = (to_device(list(each), torch.int64, self._device) for each in (changed, changed.values()))
            self.deltas.index_copy_(0, slots, deltas)

    def has(self, slices: Sequence[SequenceSlice], *, before_end: bool = False) -> bool:
        """Return whether a step has such rows; with `before_end`, at positions that are not behind all images."""
        return any(
            (row := self.rows.get(piece.slot)) is not None and (not before_end or piece.start < row.spans[-1].end)
            for piece in slices
        )

    def text_of(self, piece: SequenceSlice, drafts: list[int]) -> list[int]:
        """Return drafts up to the first that is an image's id, which follows one in the prompt and in no answer."""
        row = self.rows.get(piece.slot)
        place = -1 if row is None else piece.tokens[row.spans[0].start]
        return drafts[: drafts.index(place)] if place in drafts else drafts

    def inputs(self, slices: Sequence[SequenceSlice], texts: NDArray[np.int64]) -> ImageInputs:
        """Return what images make of a step; `texts` [T] are the positions of text."""
        axes, ends, first = np.tile(texts, (3, 1)), texts + 1, 0
        places, parts, failed, is_moved = list[int](), list[Tensor](), list[int](), False
        for index, piece in enumerate(slices):
            row = self.rows.get(piece.slot)
            if row is not None:
                if row.positions is not None:
                    axes[:, first : first + piece.num_tokens] = row.at(piece.start, piece.num_tokens)
                    is_moved = True
                for span, at in zip(row.spans, row.places, strict=True):
                    begin, end = np.searchsorted(at, (piece.start, piece.start + piece.num_tokens))
                    if begin < end:
                        rows = first + at[begin:end] - piece.start
                        made = self._embed(self._image(span))
                        if made is None:
                            failed.append(index)
                            continue
                        places += rows.tolist()
                        parts.append(made[:, begin:end])
                        if span.is_atomic:
                            ends[rows] = span.end
            first += piece.num_tokens
        vectors = Vectors(to_device(places, torch.int64, self._device), torch.cat(parts, 1)) if parts else None
        is_causal = (ends == texts + 1).all()
        return ImageInputs(
            vectors,
            to_device(axes, torch.int64, self._device) if is_moved else None,
            None if is_causal else to_device(ends, torch.int32, self._device),
            failed,
        )

    def _image(self, span: Span) -> Image:
        return self._resources.find(span.digest)


class ImageVectors:
    """The vectors of the images that were used last, in up to so many bytes; a VectorMaker."""

    def __init__(self, tower: Embed, max_bytes: int, resources: Resources) -> None:
        self._tower, self._max_bytes, self._resources = tower, max_bytes, resources
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        # By digest, the image of a request that is to fail: with it goes the failure, and others are tried again.
        self._failed: dict[bytes, ref[Image]] = {}
        self._job: tuple[bytes, Pieces[Tensor | None]] | None = None

    def has(self, digest: bytes) -> bool:
        return digest in self._kept or self._failed.get(digest, _gone)() is not None

    def advance(self, digests: Sequence[bytes], seconds: float) -> None:
        if self._job is not None and not self._resources.has(self._job[0]):  # who waited for it has left
            self.close()
        if self._job is None:
            image = replace(self._resources.find(digests[0]))  # a copy, which no request holds
            self._job = digests[0], Pieces(lambda: self._tower(image))
        digest, pieces = self._job
        if pieces.advance(seconds):
            self._job = None
            vectors = pieces.result()
            if vectors is not None:
                self._keep(digest, vectors)
            elif digest in digests:
                held = {each: found for each, found in self._failed.items() if found() is not None}
                self._failed = held | {digest: ref(self._resources.find(digest))}

    def close(self) -> None:
        self._failed.clear()
        if self._job is not None:
            self._job[1].close()
            self._job = None

    def __call__(self, image: Image) -> Tensor | None:
        """Return the vectors of an image, made now if they are not there."""
        if self._failed.pop(image.digest, _gone)() is not None:
            return None
        found = self._kept.get(image.digest)
        if found is None:
            found = self._tower(image)
            if found is None:
                return None
            self._keep(image.digest, found)
        self._kept.move_to_end(image.digest)
        return found

    def _keep(self, digest: bytes, vectors: Tensor) -> None:
        """Add vectors, and drop those used longest ago; what was just made stays, for the prompt that waits for it."""
        self._kept[digest] = vectors
        self._num_bytes += vectors.nbytes
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes


def _gone() -> None:
    """A reference to no image."""


def _places(ids: Sequence[int], span: Span) -> NDArray[np.int64]:
    """Return the positions of a span's vectors: where its first id, the model's for images, comes again.

    Some models have marks of text within an image, as between its rows.
    """
    return span.start + np.flatnonzero(np.array(ids[span.start : span.end]) == ids[span.start])


def _positions(
    num: int, spans: Sequence[Span], grids: Sequence[tuple[int, int, int] | None]
) -> tuple[NDArray[np.int64] | None, int]:
    """Return the positions of a prompt on three axes, and how far those of later tokens are from their indices.

    An image of a grid begins where the text before it ends, and takes as many positions as its longer side.
    """
    if None in grids:
        return None, 0
    found, delta = np.tile(np.arange(num), (3, 1)), 0
    for span, grid in zip(spans, grids, strict=True):
        assert grid is not None
        found[:, span.start : span.end] = np.indices(grid).reshape(3, -1) + span.start + delta
        delta += max(grid[1:]) - span.length
        found[:, span.end :] = np.arange(span.end, num) + delta
    return found, delta
