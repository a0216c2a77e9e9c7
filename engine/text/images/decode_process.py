"""The process in which images are decoded. Run by decoder.py.

A question is the file and the longest side that is wanted, empty for any; the answer is an empty error, width and height, and
the rows of RGB, or an error. The bytes come from clients, so a fault of a decoder ends only this process.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.system.calls import step_back
from engine.system.child_process import Limits, Parts, serve

MAX_PIXELS = 50 << 20  # 8,000 x 6,500, of the largest usual phones
MAX_RATIO = 200  # of the longer side to the shorter
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
LIMITS = Limits(
    memory=1 << 30,  # for 50 megapixels with transparency, 4 bytes each in three copies, and the rows
    memory_per_byte=3,
    cpu_s=10.0,  # the largest image takes 2
)
_OTHERS = {  # how files of other formats begin, at which byte
    "AVI": (8, b"AVI "),
    "AVIF": (4, b"ftypavi"),
    "BMP": (0, b"BM"),
    "EPS or PostScript": (0, b"%!PS"),
    "HEIC": (4, b"ftyphe"),
    "HEIF": (4, b"ftypmif1"),
    "ICO": (0, b"\0\0\1\0"),
    "JPEG 2000": (4, b"jP  "),
    "JPEG XL": (4, b"JXL "),
    "JPEG XL, bare": (0, b"\xff\x0a"),
    "PDF": (0, b"%PDF"),
    "Photoshop": (0, b"8BPS"),
    "SVG": (0, b"<svg"),
    "sound": (8, b"WAVE"),
    "sound in MP3": (0, b"ID3"),
    "TIFF": (0, b"II*\0"),
    "TIFF, big-endian": (0, b"MM\0*"),
    "WebM or Matroska": (0, b"\x1aE\xdf\xa3"),
    "XML, perhaps SVG": (0, b"<?xml"),
    "a ZIP archive, or a document in one": (0, b"PK\3\4"),
    "a video": (4, b"ftyp"),
}


class _RefusedError(Exception):
    """The image is not decoded; the message says why."""


def answer(parts: Parts) -> list[bytes]:
    """Return an empty error and the image."""
    longest, file = parts.pop(), parts.pop()
    image = _decode(file, int(longest or 0))
    return [b"", b"%d %d" % image.size, image.tobytes()]


def refuse(error: Exception) -> list[bytes]:
    """Return an error; a dozen decoders have errors of their own, whose words say nothing to a client."""
    return [str(error).encode() if isinstance(error, _RefusedError) else b"it is damaged, or a part of it is missing"]


def _decode(file: bytearray, longest: int) -> Image.Image:
    """Return the upright image, its first frame, in RGB on white."""
    image = _opened(file)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _RefusedError(f"it has {width} x {height} pixels, and at most {MAX_PIXELS} are read; make it smaller")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _RefusedError(f"it has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other")
    image.load()
    # Damaged EXIF may be beside whole pixels.
    with suppress(LookupError, SyntaxError, TypeError, ValueError, struct.error):
        ImageOps.exif_transpose(image, in_place=True)
    image = _in_rgb(image)
    if longest:
        image.thumbnail((longest, longest), Image.Resampling.BICUBIC)
    return image


def _opened(file: bytearray) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, and not only warned of
    try:
        return Image.open(BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        head = bytes(file[:64])
        kind = next((name for name, (at, sign) in _OTHERS.items() if head[at:].startswith(sign)), "")
        what = f"it is {kind}" if kind else "its format is not known"
        raise _RefusedError(f"{what}; send PNG, JPEG, WebP or GIF") from None


def _in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB; what is transparent in it becomes white, and 16 bits a colour become 8."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


if __name__ == "__main__":
    Image.preinit()
    step_back()
    with suppress(OSError):  # sessions, of which this process has its own, may have shares in place of processes
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    serve(answer, LIMITS, refuse)
