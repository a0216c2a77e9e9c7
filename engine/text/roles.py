"""Messages of roles that a chat template lacks, in roles that it has.

Templates differ in what they make of `developer` messages and of `system` messages behind the first turn, both of which
coding agents send: many refuse the latter, and some leave out what they do not know. So each is tried once, at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.detokenizer import Tokenizer

_PROBE = "quire-probe"


class KnownRoles(NamedTuple):
    """What a template can show."""

    developer: bool = True
    late_system: bool = True  # behind another message

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> KnownRoles:
        """Try the tokenizer's template."""
        if tokenizer.chat_template is None:
            return cls()
        return cls(
            developer=_shows(tokenizer, {"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}),
            late_system=_shows(tokenizer, {"role": "user", "content": "a"}, {"role": "system", "content": _PROBE}),
        )

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages in roles that the template has.

        `developer` becomes `system`. What then is `system` joins the system prompt if it follows it directly, else the
        user's turn, marked.
        """
        if self.developer and self.late_system:
            return messages
        fitted: list[dict[str, Any]] = []
        is_open = False  # the last turn ends with what was not the user's, and goes on with what is
        for message in messages:
            role = "system" if message["role"] == "developer" and not self.developer else message["role"]
            content, before = message["content"], fitted[-1]["role"] if fitted else None
            if role == "system" and before not in (None, "system") and not self.late_system:
                role, content = "user", f"<system-reminder>\n{content}\n</system-reminder>"
                joins, is_open = before == "user", True
            else:
                joins = before == role and (is_open if role == "user" else role == "system" and not self.late_system)
                is_open = False
            if joins:
                fitted[-1]["content"] += f"\n\n{content}"
            else:
                fitted.append({**message, "role": role, "content": content})
        return fitted


ALL_ROLES = KnownRoles()


def _shows(tokenizer: Tokenizer, *messages: Mapping[str, str]) -> bool:
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, continue_final_message=False, template_kwargs={}
        )
    except InvalidRequestError:
        return False
    return _PROBE in text
