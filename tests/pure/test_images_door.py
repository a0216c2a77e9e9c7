"""Images of clients: whatever the bytes are, they become RGB or one sentence, in a process that may be killed."""

from __future__ import annotations

import os
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.system.child_process import ChildProcess
from engine.text.images import decode_process
from engine.text.images.decoder import ImageDecoder
from tests.patience import PATIENCE_S

RED, BLUE = (200, 30, 20), (10, 40, 220)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder()
    yield made
    made.close()


def halves(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> Pillow.Image:
    """An image whose upper half is red and whose lower half is blue."""
    image = Pillow.new("RGB", size, RED)
    image.paste(BLUE, (0, size[1] // 2, *size))
    return image.convert(mode, palette=Pillow.Palette.ADAPTIVE)


def encoded(image: Pillow.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG with any header over any rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def near(pixel: Any, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(pixel, int) - colour).max() <= 8)


def refusal(decoder: ImageDecoder, file: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decoder.decode(file, "messages")
    return str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        encoded(halves(), "PNG"),
        encoded(halves(), "JPEG", quality=95),
        encoded(halves(), "JPEG", quality=95, progressive=True),
        encoded(halves("CMYK"), "JPEG", quality=95),
        encoded(halves(), "WEBP", lossless=True),
        encoded(halves("P"), "GIF"),
        encoded(halves("P"), "PNG"),
        encoded(halves(), "GIF", save_all=True, append_images=[Pillow.new("RGB", (24, 16), "white")], duration=50),
        encoded(halves(), "WEBP", save_all=True, append_images=[Pillow.new("RGB", (24, 16))], quality=95),
        encoded(halves(), "PNG", save_all=True, append_images=[Pillow.new("RGB", (24, 16))]),
    ],
    ids=[
        "png",
        "jpeg",
        "progressive",
        "cmyk",
        "webp",
        "gif",
        "palette",
        "animated-gif",
        "animated-webp",
        "animated-png",
    ],
)
def test_formats_that_are_read(decoder: ImageDecoder, file: bytes) -> None:
    pixels = decoder.decode(file, "messages")
    assert pixels.shape == (16, 24, 3)
    assert near(pixels[2, 5], RED), "of animations the first frame"
    assert near(pixels[13, 5], BLUE)


def test_turned_photos_are_turned_back(decoder: ImageDecoder) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees, clockwise
    pixels = decoder.decode(encoded(halves(), "JPEG", quality=95, exif=exif), "messages")
    assert pixels.shape == (24, 16, 3)
    assert near(pixels[5, 13], RED)
    assert near(pixels[5, 2], BLUE)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_damaged_exif_turns_nothing_and_damages_nothing(decoder: ImageDecoder, kind: str) -> None:
    whole = Pillow.Exif()
    whole[0x0112], whole[0x010F] = 6, "a maker"
    rng = random.Random(3)
    for _ in range(20):
        exif = bytearray(whole.tobytes())
        for _ in range(3):
            exif[rng.randrange(6, len(exif))] = rng.randrange(256)
        shape = decoder.decode(
            encoded(halves(), kind, exif=bytes(exif[: rng.randrange(7, len(exif))])), "messages"
        ).shape
        assert sorted(shape) == [3, 16, 24]


def test_sixteen_bits_become_eight(decoder: ImageDecoder) -> None:
    rows = b"".join(b"\0" + struct.pack(">3H", 0, 0x8000, 0xFFFF) for _ in range(2))
    assert decoder.decode(png(3, 2, rows, depth=16, colour=0), "messages")[0].tolist() == [
        [0] * 3,
        [128] * 3,
        [255] * 3,
    ]
    rows = b"\0" + struct.pack(">3H", 0x1000, 0x8000, 0xFFFF)
    assert decoder.decode(png(1, 1, rows, depth=16), "messages")[0, 0].tolist() == [16, 128, 255]


def test_transparency_is_white(decoder: ImageDecoder) -> None:
    clear = Pillow.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert (decoder.decode(encoded(clear, "PNG"), "messages") == 255).all()
    assert (decoder.decode(encoded(clear.convert("LA"), "PNG"), "messages") == 255).all()
    assert (decoder.decode(encoded(clear, "GIF"), "messages") == 255).all()


def test_a_wish_for_little_detail_is_kept(decoder: ImageDecoder) -> None:
    assert decoder.decode(encoded(halves(size=(96, 64)), "PNG"), "messages", longest=48).shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (encoded(halves(), "BMP"), "it is BMP; send PNG, JPEG, WebP or GIF"),
        (encoded(halves(), "TIFF"), "it is TIFF"),
        (b"%PDF-1.7", "it is PDF"),
        (b"\0\0\0\x18ftypheic", "it is HEIC"),
        (b"\0\0\0\x18ftyphevc", "it is HEIC"),
        (b"\0\0\0\x18ftypisom", "it is a video"),
        (b"\x1aE\xdf\xa3\1", "it is WebM"),
        (b"RIFF\0\0\0\0WAVEfmt ", "it is sound"),
        (b"PK\3\4\x14", "it is a ZIP archive, or a document in one"),
        (b"<svg onload='x'/>", "it is SVG"),
        (b"hello", "its format is not known"),
        (b"", "its format is not known"),
        (png(100_000, 100_000, b"\0" * 50), "100000 x 100000 pixels, and at most"),
        (png(1, 1_000_000, b"\0\0\0\0" * 50), "at most 200 times"),
        (png(0, 5, b""), "its format is not known"),
        (png(400, 300, b"\0" * 50), "a part of it is missing"),
        (encoded(halves(), "JPEG")[:200], "a part of it is missing"),
        (encoded(halves(size=(200, 200)), "WEBP")[:-80], "a part of it is missing"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_files_that_are_refused(decoder: ImageDecoder, file: bytes, words: str) -> None:
    said = refusal(decoder, file)
    assert words in said
    assert "0x" not in said, "an address of the process"


def test_files_that_inflate_end_no_process(decoder: ImageDecoder) -> None:
    small = png(8, 8, b"\0" * 200)
    decoder.decode(small, "messages")
    pid = decoder._child.pid
    decoder.decode(png(8, 8, b"\0" * (64 << 20)), "messages")  # rows beyond the last are not inflated
    data = b"Comment\0\0" + zlib.compress(b"x" * (64 << 20), 1)
    text = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    refusal(decoder, small[:33] + text + small[33:])
    assert decoder._child.pid == pid


def test_work_beyond_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    question = [bytearray(encoded(halves(), "PNG")), bytearray()]
    monkeypatch.setattr(Pillow.Image, "tobytes", _raise_memory_error)
    with pytest.raises(MemoryError):
        decode_process.answer(question)


def _raise_memory_error(_: object) -> None:
    raise MemoryError


def test_an_image_has_so_much_time_of_the_cores_however_long_it_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the former it is refused; beyond the latter its client may try again."""
    assert decode_process.LIMITS.cpu_s == 10.0
    monkeypatch.setattr("engine.system.child_process._ROOT", Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    decoder = ImageDecoder()
    try:
        decoder._child = ChildProcess("child_module", limit_s=PATIENCE_S)
        with pytest.raises(InvalidRequestError, match="too much memory or time to decode"):
            decoder.decode(b"spin 2", "messages")
        decoder._child = ChildProcess("child_module", limit_s=0.1)
        with pytest.raises(OverloadedError, match="try again"):
            decoder.decode(b"hang", "messages")
    finally:
        decoder.close()


def test_two_thousand_damaged_images(decoder: ImageDecoder) -> None:
    """Each is an image or a sentence, of one process."""
    decoder.decode(encoded(halves(), "PNG"), "messages")
    pid = decoder._child.pid
    rng = random.Random(7)
    whole = [
        encoded(halves(size=(9, 7)), "PNG"),
        encoded(halves("P", (9, 7)), "GIF"),
        encoded(halves(size=(9, 7)), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
        encoded(halves(size=(9, 7)), "WEBP"),
        encoded(halves(size=(9, 7)), "WEBP", save_all=True, append_images=[Pillow.new("RGB", (9, 7))]),
    ]
    num_images, said = 0, set[str]()
    for _ in range(2000):
        file = bytearray(rng.choice(whole))
        for _ in range(rng.choice((1, 1, 3, 20))):
            file[rng.randrange(len(file))] = rng.randrange(256)
        cut = rng.choice((len(file), len(file), rng.randrange(len(file))))
        try:
            pixels = decoder.decode(bytes(file[:cut]), "messages", longest=64)
        except InvalidRequestError as error:
            said.add(str(error))
        else:
            num_images += pixels.shape[2] == 3
    assert 100 < num_images < 1900
    assert all(each.startswith("messages has an image that cannot be used: ") for each in said)
    assert not any("0x" in each for each in said)
    assert decoder._child.pid == pid


def test_a_decoder_that_dies_is_one_refusal(decoder: ImageDecoder) -> None:
    file = encoded(halves(), "PNG")
    decoder.decode(file, "messages")
    os.kill(decoder._child.pid or 0, 9)
    assert decoder.decode(file, "messages").shape == (16, 24, 3), "the next one has another process"


def test_an_image_that_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.system.child_process._ROOT", Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    decoder = ImageDecoder()
    decoder._child = ChildProcess("child_module", limit_s=PATIENCE_S)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            decoder.decode(b"hang", "messages", is_wanted=lambda: False)
        except OverloadedError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # it may still be starting
        decoder.interrupt()
        thread.join(0.01)
    decoder.close()
    assert failed
