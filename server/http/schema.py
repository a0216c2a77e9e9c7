"""Base class of answers. Pure data; the base of request bodies is engine/text/fields/base.py."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ResponseBody(BaseModel):
    """Base of every answer: only what was set is sent, so a field may be null on purpose or absent."""

    model_config = ConfigDict(ser_json_inf_nan="null")

    def json_bytes(self) -> bytes:
        """Return this answer as UTF-8 JSON."""
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True)
