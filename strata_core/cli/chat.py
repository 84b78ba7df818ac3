"""`strata chat`: a conversation, turn by turn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from attrs import define, field

from strata_core.cli import INTERRUPTED
from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.console import Console, print_error
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.prompt import decoded
from strata_core.cli.request import Request, request_options
from strata_core.cli.streams import shared_stdout
from strata_core.errors import StrataError, UsageError
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from strata_core.api import Model

_LONGEST_LINE = 1 << 20


@command(
    "chat",
    [
        model_argument(),
        click.Option(["--system"], metavar="TEXT", help="Begin with this system message."),
        click.Option(
            ["--raw"],
            is_flag=True,
            help="Go on without a chat template: the turns are simply one text.",
        ),
        *request_options(),
    ],
    LOADING,
)
def command_object(
    invocation: Invocation, model: str, system: str | None, raw: bool, **options: Any
) -> int:
    """Talk with MODEL, turn by turn.

    Every line of stdin is a turn; the end of input ends the conversation, /reset begins a new one.
    The model's chat template puts the turns into words; a model without one needs --raw. Each turn
    computes the whole conversation anew, so a long one takes longer to answer. Where it outgrows
    the context its oldest turns are left out, and a line on stderr says so. Ctrl-C stops and leaves
    with exit code 130.
    """
    Request.of_options(options)
    with loaded(invocation, model) as running:
        talk = Talk(running, invocation.console, options, raw, system)
        talk.check(model)
        invocation.console.note(chosen(running.selections))
        for line in notes(running):
            invocation.console.note(line)
        interrupted = talk.go_on()
        document = {"messages": talk.messages, "left_out": talk.left_out}
        invocation.console.document({**document, **facts(running)})
    return INTERRUPTED if interrupted else 0


@define
class Talk:
    """The conversation so far: messages with `role` and `content`, as chat templates take them.

    `left_out` counts messages that the context had no more room for; they are in no later prompt.
    """

    model: Model
    console: Console
    options: dict[str, Any]
    raw: bool
    system: str | None
    messages: list[dict[str, str]] = field(factory=list)
    left_out: int = 0

    def check(self, name: str) -> None:
        """Raise UsageError where the model cannot hold a conversation as asked."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise UsageError(
                f"{name} has no tokenizer",
                "a conversation is text, and the model takes token ids only",
                "use a model that comes with its tokenizer",
            )
        if not self.raw and not tokenizer.has_chat_template:
            raise UsageError(
                f"{name} has no chat template",
                "nothing says how turns are put into words for it",
                "give --raw to go on with the turns as one text",
            )
        self._begin()

    def go_on(self) -> bool:
        """Take turns until the input ends; whether Ctrl-C ended it."""
        while (turn := self._read_turn()) is not None:
            if turn.strip() == "/reset":
                self._begin()
                continue
            if not turn.strip():
                continue
            self.messages.append({"role": "user", "content": turn})
            try:
                request = self._answer()
            except StrataError as error:
                self.messages.pop()
                # Whoever types can go on after bad input, such as a turn too long for the context.
                if not self._typed or error.exit_code != UsageError.exit_code:
                    raise
                print_error(error, json_wanted=False)
                continue
            self.messages.append({"role": "assistant", "content": request.answer})
            if request.interrupted:
                return True
        return False

    @property
    def _typed(self) -> bool:
        """Whether somebody types the turns and reads the answers."""
        return sys.stdin is not None and sys.stdin.isatty() and not self.console.json

    def _begin(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.left_out = 0

    def _read_turn(self) -> str | None:
        if sys.stdin is None:
            return None
        if self._typed:
            try:
                with shared_stdout():
                    line = input("> ")
                return decoded(line.encode("utf-8", "surrogateescape"), "the turn")
            except EOFError:
                self.console.line()
                return None
        read = sys.stdin.buffer.readline(_LONGEST_LINE)
        if len(read) == _LONGEST_LINE and not read.endswith(b"\n"):
            raise UsageError(
                "a turn is too long",
                f"a line of stdin is a turn, and it may have {_LONGEST_LINE} bytes",
                "split it into several turns",
            )
        return decoded(read, "the turn").rstrip("\r\n") if read else None

    def _answer(self) -> Request:
        request = Request.of_options(self.options)
        events = self.model.generate(
            self._fitted(request.max_tokens),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
            ignore_eos=request.ignore_eos,
        )
        request.follow(
            iter(events), lambda _, text: self.console.text(text), self.console.progress()
        )
        self.console.line()
        if request.finished is not None and request.finished.reason == "context":
            self.console.note(
                f"the answer ends here because the context of {self.model.context} tokens is full; "
                "give a larger --max-context where the model allows it"
            )
        return request

    def _fitted(self, max_tokens: int) -> list[int]:
        """The conversation's tokens, its oldest turns left out where there is no room to answer.

        Room to answer is a quarter of the context, or what may be generated, if that is less. A
        turn that is too long by itself is left to the engine to refuse; the turns before it stay.
        """
        context, kept = self.model.context, list(self.messages)
        room = max(1, min(max_tokens, context // 4))
        first = 1 if self.system else 0
        while len(ids := self._prompt(kept)) + room > context + 1 and len(kept) > first + 2:
            del kept[first : first + 2]
        if len(kept) < len(self.messages) and len(ids) <= context:
            self._leave_out(kept)
        return ids

    def _leave_out(self, kept: list[dict[str, str]]) -> None:
        """Go on with the messages of `kept` alone, and say so."""
        context, before = self.model.context, self.left_out
        self.left_out += len(self.messages) - len(kept)
        self.messages = kept
        text = f"the oldest {self.left_out} messages are left out by now"
        if not before:
            text = (
                f"the conversation is longer than the context of {context} tokens: its oldest "
                f"{self.left_out} messages are left out from here on; /reset begins a new one, "
                "a larger --max-context keeps more where the model allows it"
            )
        self.console.note(text)

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None, "`check` came first"
        if self.raw:
            text = "".join(
                ("\n" if index and message["role"] == "user" else "") + message["content"]
                for index, message in enumerate(messages)
            )
            return tokenizer.encode(text)
        # The template writes the tokens that begin a text itself.
        return tokenizer.encode(tokenizer.render_chat(messages), add_special=False)
