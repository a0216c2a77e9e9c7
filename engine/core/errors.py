"""The errors that Quire raises on purpose; server/protocol/errors.py maps them to HTTP.

A ClientError can be mended by the caller; a ServerError cannot. A message is one sentence for the person who has to act:
what, which value, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar


class QuireError(Exception):
    """The root of the tree. `str(error)` is fit to be shown to a user."""


class ClientError(QuireError):
    """The request cannot be served as it stands. `param` names the offending field, if one is to blame.

    `log_message` replaces a message that may quote the prompt in the log, which holds no prompts.
    """

    def __init__(self, message: str, *, param: str | None = None, log_message: str = "") -> None:
        super().__init__(message)
        self.param = param
        self.log_message = log_message


Item = TypeVar("Item")
Result = TypeVar("Result")


def read_each(read: Callable[[Item], Result], items: Sequence[Item], name: str = "Item") -> list[Result]:
    """Return what is read of each item. A ClientError says of which one, if there are several."""
    done = list[Result]()
    try:
        for item in items:
            done.append(read(item))
    except ClientError as error:
        if len(items) > 1:
            error.args = (f"{name} {len(done)} of {len(items)}: {error}",)
        raise
    return done


class InvalidRequestError(ClientError):
    """A value is out of range or contradicts another."""


class HeadlessModelError(InvalidRequestError):
    """The request needs an LM head, and the model has none; `served` says what it does have."""

    def __init__(self, served: str = "serves vectors alone. Send texts to /v1/embeddings") -> None:
        super().__init__(
            f"This model generates nothing: its checkpoint has no LM head, and it {served}, or choose a model with a head.",
            param="model",
        )


class UnsupportedError(InvalidRequestError):
    """A field or value is known and would change the answer, but it is not implemented here."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is not supported: {reason}", param=name)


class ContextLengthError(ClientError):
    """The prompt, or the prompt plus max_tokens, exceeds the model's context of `limit` tokens.

    `max_tokens` is 0 where the prompt alone is too long.
    """

    def __init__(self, message: str, *, param: str | None, num_prompt: int, limit: int, max_tokens: int = 0) -> None:
        super().__init__(message, param=param)
        self.num_prompt = num_prompt
        self.limit = limit
        self.max_tokens = max_tokens


class NeverFitsError(ClientError):
    """The request needs more blocks or slots than the whole engine has, so waiting cannot help."""


class AdapterLoadError(InvalidRequestError):
    """An adapter is damaged, of a kind that is not supported, or another model's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="lora_path")


class AdapterNotFoundError(ClientError):
    """There is no such adapter: no folder, or none of that name is loaded."""


class AdapterConflictError(ClientError):
    """The name is taken, or as many adapters are held as may be."""


class OverloadedError(QuireError):
    """The queue is full. `retry_after_s` is the estimated time until there is room."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(QuireError):
    """The request set a time that cannot be kept any more; nothing of it was computed."""


class ServerError(QuireError):
    """Something on our side."""


class ConfigError(ServerError):
    """A setting is wrong; raised before anything is loaded."""


class ModelLoadError(ServerError):
    """A model cannot be loaded from where it was said to be."""


class NotWantedError(ServerError):
    """A load was given up, because those who asked for it have left."""


class MemoryBudgetError(ServerError):
    """Weights, activations or the KV pool do not fit the memory they were given."""


class DeviceMemoryError(ServerError):
    """A step did not fit the memory of the device. Nothing of it counts."""


class CopyError(DeviceMemoryError):
    """Blocks could not be copied to or from host memory. Nothing of the step counts."""


class DeviceLostError(ServerError):
    """The device is broken, or lost to this process, which must be restarted."""


class ComputeError(ServerError):
    """The model's answer for one sequence is unusable (for example NaN logits); only that sequence ends."""


class ShuttingDownError(ServerError):
    """The daemon is draining; it has ended in `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(ServerError):
    """The engine thread has ended on an error; the process must be restarted."""


class ParcelError(QuireError):
    """K/V could not be handed over; the prompt is computed instead."""


class UnreachableError(QuireError):
    """Another daemon could not be reached, or left in the middle."""


class ErrorValue(NamedTuple):
    """An error as a value, which crosses between the engine and its clients: the name of a class above and a sentence."""

    code: str
    sentence: str
    details: tuple[tuple[str, str | int | float | None], ...] = ()  # the other attributes of the exception

    @classmethod
    def of(cls, error: QuireError) -> ErrorValue:
        """Return an error's value."""
        kind = next(each for each in type(error).__mro__ if each.__module__ == __name__)
        return cls(kind.__name__, str(error), tuple(vars(error).items()))

    def exception(self) -> QuireError:
        """Return an exception that is equal to the one this is the value of."""
        kind: type[QuireError] = globals()[self.code]
        error = kind.__new__(kind, self.sentence)
        error.__dict__.update(self.details)
        return error

    def __str__(self) -> str:
        return self.sentence
