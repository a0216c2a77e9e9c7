"""The page of other servers' flags."""

from __future__ import annotations

from collections.abc import Iterator

from engine.settings.foreign import KEY_VARIABLES, PROGRAMS, REFUSED_VALUES, VALUES, Foreign, Takes
from engine.settings.setting import to_flag
from tests.reference.tables import MADE, cell, table

_HEAD = f"""# Flags of other servers

{MADE}

`quire serve` understands these flags of vLLM, llama-server, SGLang, TGI and TEI beside its own [settings](settings.md), on the command line and as keys of a `--config` file.
Flags that are spelled alike and mean the same in both programs are in the settings only. A flag without effect is named once
at the start. A flag that would change answers is translated or refused, never dropped; one start names all that are refused. Underscores in flags are hyphens, and
`--no-FLAG` turns a switch off. Numbers of tokens are understood as `32k` (32,000), `32K` (32,768), `1m` and `1M`.

The guides [from vLLM](../guides/from-vllm.md), [from llama.cpp](../guides/from-llama-cpp.md) and [from SGLang, TGI, TEI or
Ollama](../guides/from-others.md) show whole commands.
"""

_UNREAD = (
    "not read, and named at the start, because they may be meant for another program on the machine; write "
    "`QUIRE_LOG_LEVEL` for `VLLM_LOGGING_LEVEL`, `QUIRE_MAX_MODEL_LEN` for `LLAMA_ARG_CTX_SIZE`, and so on"
)


def foreign_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_programs(), *_values(), *_variables()])


def _programs() -> Iterator[str]:
    for program, rows in PROGRAMS.items():
        yield f"## Flags of {program}\n"
        yield from table(("flag", "here", ""), ((_flags(row), *_meaning(row)) for row in rows))


def _flags(row: Foreign) -> str:
    return ", ".join(f"`{flag}`" for flag in row.flags)


def _meaning(row: Foreign) -> tuple[str, str]:
    """Return what a flag does here, and why or how."""
    if row.setting:
        own = "`MODEL`" if row.setting == "model" else f"`{to_flag(row.setting)}`"
        key = f", key `{row.key}`" if row.key else ""
        named = [f"`{theirs}` is {_value(ours)}" for theirs, ours in row.values.items()]
        if row.takes is Takes.SWITCH:
            named = [f"sets {_value(row.values.get('True', True))}"]
        return own + key, cell("; ".join([*([row.note] if row.note else []), *named]))
    if row.refused:
        return "refused", cell(row.refused)
    if not row.only:
        return "no effect", cell(row.no_effect)
    values = ", ".join(f"`{value}`" for value in row.only)
    return f"{values}: no effect", cell(f"{row.no_effect}; others are refused: {row.otherwise}")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "the default" if value is None else f"`{value}`"


def _values() -> Iterator[str]:
    yield "## Values\n\nSettings that Quire has, too, take these values of other servers.\n"
    rows = [
        (f"`{to_flag(name)}`", f"`{theirs}`", f"`{ours}`", "")
        for name, values in VALUES.items()
        for theirs, ours in values.items()
    ]
    rows += [(f"`{to_flag(name)}`", f"`{word}`", "refused", cell(why)) for name, word, why in REFUSED_VALUES]
    yield from table(("setting", "value", "here", ""), rows)


def _variables() -> Iterator[str]:
    keys = " and ".join(f"`{name}`" for name in KEY_VARIABLES)
    yield "## Variables\n"
    rows = [
        (keys, "the keys of `--api-key`, where that, `QUIRE_API_KEY` and the file name none; an empty one is refused"),
        ("`HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`", "as in every program of Hugging Face"),
        ("`CUDA_VISIBLE_DEVICES`", "the first GPU that it names is used"),
        (
            "other `VLLM_*`, `LLAMA_ARG_*`",
            _UNREAD,
        ),
    ]  # fmt: skip
    yield from table(("variable", "here"), rows)
