"""Reads the file given by --tenants: the tenants' names, keys, weights and limits.

    tiers:
      gold: {weight: 4}
      free: {weight: 1, max_concurrent_requests: 4, tokens_per_minute: 20000}
    tenants:
      - {name: acme, tier: gold, key_env: ACME_KEY}
      - {name: hobby, tier: free, key_sha256: <what `printf %s "$KEY" | sha256sum` prints>}
      - {name: here, key: in-plain-sight, weight: 2}

A tenant's own terms override its tier's. A key can be given by a variable or a digest instead of plainly. Read at start-up
and on SIGHUP; every fault is a ConfigError that never repeats a key.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.core.errors import ConfigError
from server.settings.files import read_yaml

DEFAULT = "default"  # the name of everything that is no tenant of the file: keys of --api-key

_NOTHING = sha256(b"").digest()

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant, its tier resolved. None is no limit."""

    name: str
    digests: tuple[bytes, ...] = ()  # SHA-256 of its keys
    tier: str = ""
    weight: float = 1.0
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


class _Terms(BaseModel):
    """Terms of tiers and tenants. A null is refused: it would limit nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    weight: float | None = Field(None, ge=0.001, le=1000)
    max_concurrent_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _refuse_null(cls, content: Any) -> Any:
        empty = [name for name, value in content.items() if value is None] if isinstance(content, dict) else []
        if empty:
            raise PydanticCustomError("empty", "{name} has no value; give one, or remove it", {"name": empty[0]})
        return content


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class _Tenant(_Terms):
    name: Name
    tier: str | None = None
    key: Annotated[list[SecretStr], BeforeValidator(_listed)] = Field(default_factory=list)
    key_env: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)
    key_sha256: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    tiers: dict[Name, _Terms] = Field(default_factory=dict)
    tenants: list[_Tenant] = Field(min_length=1)


def read_tenants(path: Path, api_keys: Iterable[str] = ()) -> tuple[Tenant, ...]:
    """Return a file's tenants; none may have an API key. Raises ConfigError."""
    try:
        file = _File.model_validate(read_yaml("--tenants", path, has_secrets=True))
        tenants = tuple([_resolve(entry, file.tiers) for entry in file.tenants])
        _refuse_twins(tenants, api_keys)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")  # a misspelt name explains a missing one
        raise ConfigError(f"--tenants is {str(path)!r}, {_fault(faults[0])}.") from None
    except ValueError as error:
        raise ConfigError(f"--tenants is {str(path)!r}, {error}.") from None
    return tenants


def _fault(error: ErrorDetails) -> str:
    """Return a description of a fault without the value, which may be a key."""
    *parents, last = [str(part) for part in error["loc"][:3]] or [""]
    at = ".".join([*parents, last])
    if not last:
        return "which is not a file of tenants; it begins with the line tenants:"
    if error["type"] == "extra_forbidden":
        model: type[BaseModel] = _File if not parents else _Terms if parents[0] == "tiers" else _Tenant
        known = list(model.model_fields)
        may_be = " and ".join(known) if not parents else "one of " + ", ".join(known)
        return f"in which {at} is unknown; {may_be} may be there"
    if error["type"] in ("model_type", "dict_type"):
        return f"in which {at} holds no settings; write them as {{name: value}}"
    if error["type"] == "string_type":
        return f"in which {at} is no text; put it in quotes"
    return f"in which {at} is wrong: {error['msg']}"


def _resolve(entry: _Tenant, tiers: dict[str, _Terms]) -> Tenant:
    if entry.tier is not None and entry.tier not in tiers:
        raise ValueError(
            f"in which tenant {entry.name} is of tier {entry.tier!r}; tiers are {', '.join(tiers) or 'none'}"
        )
    terms = {} if entry.tier is None else tiers[entry.tier].model_dump(exclude_unset=True)
    terms |= entry.model_dump(include=set(_Terms.model_fields), exclude_unset=True)
    return Tenant(name=entry.name, digests=tuple(_digests(entry)), tier=entry.tier or "", **terms)


def _digests(entry: _Tenant) -> list[bytes]:
    keys = [key.get_secret_value() for key in entry.key]
    for variable in entry.key_env:
        if not os.environ.get(variable):
            raise ValueError(f"in which the key of tenant {entry.name} is the variable {variable}, which is not set")
        keys.append(os.environ[variable])
    if not all(key and key == key.strip() for key in keys):
        raise ValueError(f"in which a key of tenant {entry.name} is empty, or begins or ends with a space")
    found = [sha256(key.encode()).digest() for key in keys]
    for text in entry.key_sha256:
        if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
            raise ValueError(f"in which key_sha256 of tenant {entry.name} is not 64 hexadecimal digits")
        if bytes.fromhex(text) == _NOTHING:
            raise ValueError(
                f"in which key_sha256 of tenant {entry.name} is the digest of an empty key; make it of the key itself"
            )
        found.append(bytes.fromhex(text))
    if not found:
        raise ValueError(f"in which tenant {entry.name} has no key; give it key, key_env or key_sha256")
    return found


def _refuse_twins(tenants: tuple[Tenant, ...], api_keys: Iterable[str]) -> None:
    for name, count in Counter([tenant.name for tenant in tenants]).items():
        if count > 1 or name == DEFAULT:
            why = "is there twice" if count > 1 else "is reserved for callers that are no tenant of the file"
            raise ValueError(f"in which the name {name} {why}; choose another")
    owners = {sha256(key.encode()).digest(): "--api-key" for key in api_keys}
    for tenant in tenants:
        for digest in tenant.digests:
            other = owners.setdefault(digest, tenant.name)
            if other is not tenant.name:
                raise ValueError(f"in which {other} and {tenant.name} have the same key; give each its own")
