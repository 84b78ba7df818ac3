"""The options of a request (how long, how random, when to stop), shared by generate and chat."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click
from attrs import define, field, frozen

from strata_core.cli.command import SectionedOption
from strata_core.cli.numbers import real, whole
from strata_core.cli.progress import TerminalProgress
from strata_core.cli.prompt import decoded
from strata_core.errors import UsageError

if TYPE_CHECKING:
    from strata_core.engine.messages import Event, Finished
    from strata_core.sampler import Sampling

DEFAULT_TOKENS = 128


@frozen
class _Number:
    """An option that takes a number: a whole one where `metavar` is N."""

    names: tuple[str, ...]
    metavar: Literal["N", "F"]
    default: int | float
    help: str


_NUMBERS = (
    _Number(
        ("-n", "--max-tokens"),
        "N",
        DEFAULT_TOKENS,
        f"Generate at most this many tokens. Default: {DEFAULT_TOKENS}.",
    ),
    _Number(
        ("--temperature",),
        "F",
        0.0,
        "How random the choice is. Default: 0, the likeliest token.",
    ),
    _Number(
        ("--top-k",),
        "N",
        0,
        "Choose among the N likeliest tokens. Default: 0, all.",
    ),
    _Number(
        ("--top-p",),
        "F",
        1.0,
        "Choose among the likeliest tokens that have this share together. Default: 1.",
    ),
    _Number(
        ("--min-p",),
        "F",
        0.0,
        "Drop tokens less likely than this share of the likeliest. Default: 0.",
    ),
    _Number(
        ("--repetition-penalty",),
        "F",
        1.0,
        "Make tokens that occurred less likely. Default: 1, no penalty.",
    ),
    _Number(
        ("--repetition-window",),
        "N",
        0,
        "Let the penalty see the last N tokens. Default: 0, all.",
    ),
    _Number(("--seed",), "N", 0, "Seed of the random numbers. Default: 0."),
)
_SAMPLING = tuple(number.names[-1][2:].replace("-", "_") for number in _NUMBERS[1:])


def request_options() -> list[click.Parameter]:
    """Fresh options for one command."""
    numbers: list[click.Parameter] = [
        SectionedOption(
            list(number.names),
            type=whole() if number.metavar == "N" else real,
            default=number.default,
            metavar=number.metavar,
            help=number.help,
            section="Request",
        )
        for number in _NUMBERS
    ]
    return [
        *numbers,
        SectionedOption(
            ["--stop"],
            multiple=True,
            metavar="TEXT",
            help="End before this text; may be given several times.",
            section="Request",
        ),
        SectionedOption(
            ["--ignore-eos"],
            is_flag=True,
            help="Go on after the model's end-of-text token.",
            section="Request",
        ),
    ]


@define
class Request:
    """A request as the options describe it, and what has come of it so far.

    `token_ids` and `text` grow as events arrive, so that an interrupted run can still show them.
    """

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    token_ids: list[int] = field(factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    finished: Finished | None = None
    interrupted: bool = False

    @classmethod
    def of_options(cls, options: dict[str, Any]) -> Request:
        """A request from the values of `request_options`. Raises UsageError."""
        from strata_core.sampler import Sampling

        if "" in options["stop"]:
            raise UsageError(
                "--stop '' is empty",
                "every text begins with the empty text, so nothing could be generated",
                "give the text to stop before, or leave --stop out",
            )
        # What was not UTF-8 on the command line would be a text that no answer contains.
        stop = tuple(
            decoded(s.encode("utf-8", "surrogateescape"), "--stop") for s in options["stop"]
        )
        sampling = Sampling(**{name: options[name] for name in _SAMPLING})
        return cls(options["max_tokens"], sampling, stop, options["ignore_eos"])

    @property
    def answer(self) -> str:
        """The text so far, whole once the request has finished."""
        return self.finished.text if self.finished else self.text

    def follow(
        self,
        events: Iterator[Event],
        show: Callable[[int | None, str], None],
        progress: TerminalProgress,
    ) -> None:
        """Take every event; `show` gets each token's id and text, and None with a last text.

        The first Ctrl-C cancels the request, waits for the round that runs, and sets
        `interrupted`; the next one kills the process. The iterator is closed whatever happens,
        which cancels what is still running.
        """
        progress.begin("prompt", 0, "tokens")
        try:
            with _interrupts():
                for event in events:
                    self._take(event, show, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            progress.close()
            close = getattr(events, "close", None)
            if close is not None:
                close()

    def _take(
        self, event: Event, show: Callable[[int | None, str], None], progress: TerminalProgress
    ) -> None:
        from strata_core.engine.messages import Finished, PromptProgress, Token

        if isinstance(event, PromptProgress):
            self.prompt_tokens = event.total
            progress.reach(event.done, event.total)
        elif isinstance(event, Token):
            progress.close()
            self.token_ids.append(event.id)
            self.text += event.text
            show(event.id, event.text)
        elif isinstance(event, Finished):
            self.finished = event
            # What was held back, because it might have begun a stop text, is shown at the end.
            show(None, event.text.removeprefix(self.text))


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt and any later one kill the process.

    After a first Ctrl-C it stays that way: what is left to do then is to clean up. A process that
    was started to ignore Ctrl-C, as shells do with jobs in the background, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise
    else:
        signal.signal(signal.SIGINT, before)
