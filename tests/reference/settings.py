"""The settings as a page, docs/reference/settings.md."""

from __future__ import annotations

from collections.abc import Iterator

from engine.settings.setting import Declared, features, to_flag
from server.settings.flags import GROUPS, default_of
from server.settings.settings import DECLARED, ENV_PREFIX

_HEAD = f"""# Settings

Made from the code by `python -m tests.reference`; a test compares them, so this page describes this version.

Each can be given as a flag, as a variable (`--max-num-seqs` is `{ENV_PREFIX}MAX_NUM_SEQS`) or in the YAML file of `--config`
(`max-num-seqs: 64`). A flag wins over a variable, a variable over the file. Keys of JSON settings stand below their setting.
"""


def settings_section() -> Iterator[str]:
    """Yield the lines of the page."""
    yield _HEAD
    known = features(DECLARED)
    for group in GROUPS:
        own = [each for each in DECLARED if each.setting.group == group]
        yield f"## {group}\n\n| setting | takes | if absent | |\n|---|---|---|---|"
        for each in own:
            if not each.setting.feature:
                name = "MODEL" if each.name == "model" else to_flag(each.name)
                yield _row(f"`{name}`", each)
        for name in dict.fromkeys(each.setting.feature for each in own if each.setting.feature):
            yield f"| `{to_flag(name)}` | JSON | | |"
            for key, each in known[name].items():
                yield _row(f"– `{key}`", each)
        yield ""


def _row(name: str, each: Declared) -> str:
    setting = each.setting
    takes = ", ".join(f"`{choice}`" for choice in setting.choices) or setting.unit or "on, off"
    return f"| {name} | {takes} | {default_of(each)} | {setting.help.replace('|', chr(92) + '|')} |"
