"""What goes to the engine and what comes back: frozen records that also travel as JSON.

A front end sends `Submit`, `Cancel`, `AskStatus` and `Shutdown`, and receives events. In process
the records themselves pass through queues; over a pipe `encode` and `decode` turn them into plain
JSON-able dictionaries and back, losing nothing.
"""

from __future__ import annotations

import base64
import traceback
from typing import Any, Literal

import attrs
import numpy as np
from attrs import field, frozen

from strata_core.errors import ERRORS, EngineError, StrataError
from strata_core.sampler import Sampling

Reason = Literal["length", "context", "eos", "stop", "cancelled"]
"""Why a request ended: as many tokens as asked, no room left in the context, an end-of-text token,
a stop text, or somebody cancelled it."""


# --- to the engine -----------------------------------------------------------------------------


@frozen(kw_only=True)
class Submit:
    """Run a prompt and continue it by up to `max_tokens` tokens.

    `request` is the sender's name for it, unique among running ones. `stop` are texts that end the
    continuation and are not part of it. With `ignore_eos` an end-of-text token is an ordinary one.
    `continuation` are ids that follow the prompt whatever the logits say, for measuring: tokens are
    drawn all the same, which takes its time, and those beyond its length stand.
    `logits` asks for `Logits` events: of every prompt position ("prompt"), or of the last one
    alone, from which the first token is drawn ("first").
    """

    request: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    continuation: tuple[int, ...] = ()
    logits: Literal["none", "first", "prompt"] = "none"


@frozen
class Cancel:
    """End a request at the next round; it finishes with reason "cancelled"."""

    request: str


@frozen
class AskStatus:
    """Answered at once by a `Status` event."""


@frozen
class Shutdown:
    """Cancel everything, answer for it, and end the engine's thread."""


Command = Submit | Cancel | AskStatus | Shutdown


# --- from the engine ---------------------------------------------------------------------------


@frozen
class PromptProgress:
    """`done` of `total` prompt tokens have been computed."""

    request: str
    done: int
    total: int


@frozen(eq=False)
class Logits:
    """Float32 logits [n, vocabulary] of the prompt positions `start` to `start + n - 1`."""

    request: str
    start: int
    logits: np.ndarray


@frozen
class Token:
    """One generated token. `text` may be empty while a character or a stop text is incomplete."""

    request: str
    id: int
    text: str
    position: int


@frozen(kw_only=True)
class Finished:
    """The end of a request that went well; always its last event.

    `token_ids` hold a final end-of-text token where there was one, `text` does not.
    `first_logits_sha256` is over the raw little-endian float32 logits of the first generated
    position ("" where none was generated). Times are seconds; `rounds` counts decode rounds.
    """

    request: str
    reason: Reason
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_logits_sha256: str
    prompt_s: float
    decode_s: float
    rounds: int


@frozen(kw_only=True)
class Failed:
    """The end of a request that did not go well; always its last event.

    `trace` is the stack trace of an error that nobody foresaw, else empty.
    """

    request: str
    type: str
    what: str
    why: str
    remedy: str
    exit_code: int
    trace: str = ""

    @classmethod
    def of(cls, request: str, error: BaseException) -> Failed:
        """The event that reports `error`; an unforeseen one becomes an EngineError."""
        trace = ""
        if not isinstance(error, StrataError):
            trace = "".join(traceback.format_exception(error))
            error = EngineError(
                "a round failed",
                f"{type(error).__name__}: {error}",
                "run again with --debug to see where, and please report it",
            )
        return cls(
            request=request,
            type=type(error).__name__,
            what=error.what,
            why=error.why,
            remedy=error.remedy,
            exit_code=error.exit_code,
            trace=trace,
        )

    def as_error(self) -> StrataError:
        """An error of the same class to raise on the front end's side, with its lines and code."""
        error = ERRORS.get(self.type, EngineError)(self.what, self.why, self.remedy)
        error.exit_code = self.exit_code
        if self.trace:
            error.add_note(self.trace)
        return error


@frozen(kw_only=True)
class Status:
    """How the engine stands: requests running and waiting, rounds and tokens so far."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    rounds: int
    prompt_tokens: int
    generated_tokens: int


@frozen
class Stopped:
    """The engine's thread has ended; nothing comes after it."""


Event = PromptProgress | Logits | Token | Finished | Failed | Status | Stopped

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Submit,
        Cancel,
        AskStatus,
        Shutdown,
        PromptProgress,
        Logits,
        Token,
        Finished,
        Failed,
        Status,
        Stopped,
    )
}


def encode(message: Command | Event) -> dict[str, Any]:
    """A JSON-able dictionary that `decode` turns back into an equal record."""
    body = attrs.asdict(message, value_serializer=_plain, recurse=True)
    return {"kind": type(message).__name__, **body}


def _plain(_owner: object, _field: object, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f4")
        return {"shape": list(data.shape), "f4": base64.b64encode(data.tobytes()).decode("ascii")}
    return value


def decode(body: dict[str, Any]) -> Command | Event:
    """The record that `encode` made `body` from; ValueError for anything else."""
    fields = dict(body)
    kind = _KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise ValueError(f"not an engine message: {body.get('kind')!r}")
    if "sampling" in fields:
        fields["sampling"] = Sampling(**fields["sampling"])
    if kind is Logits:
        packed = fields["logits"]
        flat = np.frombuffer(base64.b64decode(packed["f4"]), "<f4")
        fields["logits"] = flat.reshape(packed["shape"])
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    try:
        record: Command | Event = kind(**fields)
    except TypeError as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error
    return record
