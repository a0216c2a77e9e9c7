"""Reads a multipart upload and writes its file in pieces, on worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.batches.folder import NewFile
from server.protocol.errors import ApiError

PIECE_BYTES = 1024 * 1024
MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_BOUNDARY_BYTES = 256  # MIME allows 70


class Form:
    """The fields of a form; its file is written to `file` as it arrives."""

    def __init__(self, content_type: str, file: NewFile) -> None:
        """Raises a 400 for a body that is not a multipart form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary or len(boundary) > MAX_BOUNDARY_BYTES:
            message = (
                "The Content-Type is not multipart/form-data with a boundary of at most "
                f"{MAX_BOUNDARY_BYTES} bytes; send the file as a form's field 'file'."
            )
            raise ApiError(400, "unsupported_media_type", message)
        self.fields: dict[str, str] = {}
        self._filename: str | None = None  # of the file's part, once it has come
        self._file = file
        self._piece = bytearray()  # of the file, not written yet
        self._header = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""  # of the part
        self._field = bytearray()
        self._num_parts = 0
        self._is_whole = False
        callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._name_part,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._complete,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # a TypedDict of the same names

    async def read(self, stream: AsyncIterable[bytes]) -> str:
        """Return the file's name after reading the body. Raises a 400 without a file."""
        try:
            async for data in stream:
                self._parser.write(data)
                if len(self._piece) >= PIECE_BYTES:
                    await self._flush()
            self._parser.finalize()
        except MultipartParseError as error:
            raise ApiError(400, "invalid_multipart", f"The form cannot be read: {error}.") from error
        if not self._is_whole:
            raise ApiError(400, "invalid_multipart", "The form ends before its closing boundary; send all of it.")
        if self._filename is None:
            raise ApiError(400, "missing_required_parameter", "file: Field required, as a part with a filename", "file")
        await self._flush()
        return self._filename

    async def _flush(self) -> None:
        piece, self._piece = bytes(self._piece), bytearray()
        await asyncio.to_thread(self._file.write, piece)

    def _begin(self) -> None:
        self._disposition, self._field = b"", bytearray()
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, "invalid_multipart", f"The form has more than {MAX_PARTS} parts; send fewer.")

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        self._header = bytearray(), bytearray()
        if name.lower() == b"content-disposition":
            self._disposition = value

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:64]
        if self._name != "file":
            return
        if self._filename is not None:
            raise ApiError(400, "invalid_value", "The form has two files; upload one at a time.", "file")
        self._filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255] or "file"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._piece += data[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            message = f"The form's field {self._name!r} is longer than {MAX_FIELD_BYTES} bytes; shorten it."
            raise ApiError(400, "invalid_value", message, self._name)

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _complete(self) -> None:
        self._is_whole = True
