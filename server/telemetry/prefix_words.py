"""Says in words why the prefix cache gave a prompt no more than it did, for a client that asks. Any thread."""

from __future__ import annotations

from array import array

from engine.text.chat.history import ID_BYTES, Fork, RecentPrompt
from engine.text.chat.limits import num_common
from engine.text.message_fallbacks import message_heads
from engine.text.tokenizer import TextTokenizer
from server.telemetry.prefix_ends import Cause, PrefixEnd

_MAX_QUOTE = 40  # characters


def in_words(end: PrefixEnd, tokenizer: TextTokenizer, *, has_states: bool, shows_text: bool) -> str:
    """Return the cause in a sentence, with what stands at the place if that `shows_text`, which then takes milliseconds."""
    fork, at = end.fork, f"{end.position:,}"
    tag = "" if fork is None else f"your earlier request {fork.earlier.tag}"
    common = "" if fork is None else f"{fork.num_common:,} tokens"
    words = {
        Cause.EXTENDED: f"All whole blocks were reused of what {tag} has in common, {common}.",
        Cause.NEW: f"Nothing earlier goes on like this prompt after token {at}.",
        Cause.BROKEN: f"The prefix broke at token {at} of {tag}",
        Cause.ANSWER: f"The prompt leaves {tag} in its answer, at token {at}",
        Cause.EVICTED: f"Evicted after position {at}: {tag} has {common} in common.",
        Cause.NO_STATE: f"No {'snapshot' if has_states else 'window'} after position {at}, though the K/V of "
        f"{end.num_matched:,} tokens is there: {tag} has {common} in common.",
        Cause.UNFINISHED: f"Not computed after position {at}: {tag} has {common} in common, and had not ended or was cut short.",
        Cause.OTHER_SALT: f"Kept apart by cache_salt: {tag} has {common} in common.",
        Cause.OTHER_ADAPTER: f"Kept apart by the adapter: {tag} has {common} in common.",
        Cause.UNREAD: "Not looked for: prompt_logprobs need every position.",
        Cause.SHORT: "Too short: what is reused are whole blocks before the last token.",
        Cause.FORGOTTEN: f"Reused up to position {at}, of another prompt than those that are remembered of this tenant.",
    }[end.cause]
    if fork is None or end.cause not in (Cause.BROKEN, Cause.ANSWER):
        return words
    if not shows_text:
        return f"{words}."
    now, was = _quote(tokenizer, fork)
    role = _role_at(tokenizer, end.prompt, end.position) if end.cause is Cause.BROKEN else ""
    return f"{words}: `{now}` for `{was}`" + (f", in the {role} message." if role else ".")


def _quote(tokenizer: TextTokenizer, fork: Fork) -> tuple[str, str]:
    """Return the word at which a prompt leaves an earlier one, and the word there; special tokens if only these differ."""
    for skip in (True, False):
        now, was = (tokenizer.decode(array("I", ids), skip_special_tokens=skip) for ids in (fork.now, fork.was))
        if now != was:
            break
    num = num_common(now, was)
    begin = max(now.rfind(space, 0, num) for space in " \n\t") + 1
    return _word(now, begin, num), _word(was, begin, num)


def _role_at(tokenizer: TextTokenizer, prompt: RecentPrompt, num: int) -> str:
    """Return the role of the message at a place of a prompt, as the chat template writes it; "" if it is not known."""
    template = tokenizer.chat_template
    while prompt.heir is not None:
        prompt = prompt.heir
    text = tokenizer.decode(array("I", prompt.ids[: num * ID_BYTES]), skip_special_tokens=False)
    heads = {} if template is None else message_heads(template)
    found = [(text.rfind(head), len(head), role) for role, head in heads.items() if head in text]
    return max(found, default=(0, 0, ""))[2]


def _word(text: str, begin: int, num: int) -> str:
    """Return what surrounds a place of a text, up to the next spaces."""
    end = next((at for at in range(num + 1, len(text)) if text[at].isspace()), len(text))
    return text[max(begin, num - _MAX_QUOTE // 2) : min(end, num + _MAX_QUOTE // 2)]
