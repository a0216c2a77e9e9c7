"""Detokenization and stop strings against the whole-string computation, for any split of any text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.text.tokenizer import MAX_HELD_TOKENS, Detokenizer, Lengths, StopStrings, lengths_of

TEXTS = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=("Cs",)), max_size=40)
FEW_LETTERS = st.text("abc", max_size=30)


class Pieces:
    """A tokenizer whose ids are the pieces of one text's UTF-8 bytes, cut anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")

    @property
    def lengths(self) -> list[Lengths]:
        return lengths_of(self.decode)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


class Library:
    """One of `tokenizers`' own, which knows special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def lengths(self) -> list[Lengths]:
        return lengths_of(self.decode)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes.fromhex(token[3:5]) if (token := SENTENCEPIECE[token_id]).startswith("<0x") else token.encode()


def cut(data: bytes, points: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({point % (len(data) + 1) for point in points}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def first_completed(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The oracle: read character by character; the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stop = max(endings, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXTS, st.lists(st.integers(0, 200), max_size=60), st.integers(0, 60))
def test_any_split_gives_the_text_and_never_half_a_character(text: str, points: list[int], num_prompt: int) -> None:
    pieces = cut(text.encode(), points)
    ids = range(len(pieces))
    stream = Detokenizer(Pieces(pieces), ids[:num_prompt], skip_special_tokens=True)
    shown = [stream.push(token_id) for token_id in ids[num_prompt:]]
    prompt = b"".join(pieces[:num_prompt]).decode(errors="ignore")
    assert prompt + "".join(shown) + stream.flush() == text
    assert "\ufffd" not in "".join(shown)


@given(st.lists(st.sampled_from("a\ufffdé"), max_size=6), st.integers(0, 6))
def test_a_prompt_with_the_replacement_character_keeps_it_to_itself(letters: list[str], num_prompt: int) -> None:
    pieces = [letter.encode() for letter in letters]
    stream = Detokenizer(Pieces(pieces), range(num_prompt)[: len(pieces)], skip_special_tokens=True)
    answer = "".join(stream.push(token_id) for token_id in range(num_prompt, len(pieces)))
    assert answer + stream.flush() == "".join(letters[num_prompt:])


@given(TEXTS, st.integers(0, 200), st.lists(st.integers(0, 200), max_size=60))
def test_a_text_cut_within_a_character_ends_honestly(text: str, end: int, points: list[int]) -> None:
    data = text.encode()[:end]
    pieces = cut(data, points)
    stream = Detokenizer(Pieces(pieces), (), skip_special_tokens=True)
    shown = "".join(stream.push(token_id) for token_id in range(len(pieces)))
    assert "\ufffd" not in shown
    assert shown + stream.flush() == data.decode(errors="replace")


def test_bytes_that_are_no_text_are_shown_as_such_in_bounded_time() -> None:
    stream = Detokenizer(Pieces([b"\xff"]), (), skip_special_tokens=True)
    shown = [stream.push(0) for _ in range(10 * MAX_HELD_TOKENS)]
    assert "".join(shown) + stream.flush() == "\ufffd" * (10 * MAX_HELD_TOKENS)
    assert shown.count("") < len(shown)


SENTENCEPIECE = ["<unk>", "▁the", "▁a", "b", "▁", "c▁d", *(f"<0x{byte:02X}>" for byte in "é😀".encode()), "<end>"]


def sentencepiece() -> Library:
    vocabulary = {piece: index for index, piece in enumerate(SENTENCEPIECE)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return Library(tokenizer)


@example([(8, 9, 10, 11)] * 3, 2)  # the context must not begin within a character
@example([(2,), (12,), (1,)], 1)  # a special token between words must not cost the space
@given(
    st.lists(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6, 7), (8, 9, 10, 11), (12,)]), max_size=20),
    st.integers(0, 20),
)
def test_leading_spaces_and_byte_runs_survive_as_in_one_decode(words: list[tuple[int, ...]], num_prompt: int) -> None:
    tokenizer = sentencepiece()
    prompt = [token_id for word in words[:num_prompt] for token_id in word]
    answer = [token_id for word in words[num_prompt:] for token_id in word]
    stream = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=True)
    known = tokenizer.decode(prompt, skip_special_tokens=True)
    assert known + "".join(stream.push(token_id) for token_id in answer) + stream.flush() == whole


@example("abc", [], ["abc", "b"], False)  # the one that ends first, not the one that begins first
@given(
    FEW_LETTERS,
    st.lists(st.integers(0, 30), max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_split(text: str, points: list[int], stops: list[str], include: bool) -> None:
    matcher = StopStrings(stops, include_in_output=include)
    shown = ""
    for piece in cut(text.encode(), points):
        shown += matcher.push(piece.decode())
        if matcher.matched is not None:
            break
    assert (shown + matcher.flush(), matcher.matched) == first_completed(text, stops, include)


@given(FEW_LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_held_back_text_is_never_more_than_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops, include_in_output=False)
    shown = ""
    for end, letter in enumerate(text, 1):
        shown += matcher.push(letter)
        if matcher.matched is not None:
            return
        held = text[:end].removeprefix(shown)
        assert any(stop.startswith(held) and stop != held for stop in stops) or not held


@pytest.mark.parametrize(("include", "shown"), [(False, "one "), (True, "one END")])
def test_what_follows_a_stop_string_is_gone(include: bool, shown: str) -> None:
    matcher = StopStrings(["END"], include_in_output=include)
    assert matcher.push("one E") == "one "
    assert "one " + matcher.push("ND of it") == shown
    assert (matcher.matched, matcher.flush()) == ("END", "")
