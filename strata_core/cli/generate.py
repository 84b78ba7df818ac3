"""`strata generate`: continue a prompt, showing the text as it comes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from strata_core.cli import INTERRUPTED
from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.console import Console
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.prompt import read_prompt
from strata_core.cli.request import Request, request_options
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from strata_core.api import Model


@command(
    "generate",
    [
        model_argument(),
        click.Argument(["prompt"], required=False, metavar="[PROMPT]"),
        click.Option(
            ["--prompt-ids"],
            metavar="IDS",
            help="The prompt as token ids, e.g. 5,9,3: for a model without a tokenizer.",
        ),
        *request_options(),
    ],
    LOADING,
)
def command_object(
    invocation: Invocation, model: str, prompt: str | None, prompt_ids: str | None, **options: Any
) -> int:
    """Continue PROMPT with MODEL.

    Without PROMPT, or with `-`, the prompt is read from stdin, less one final line break. The text
    goes to stdout as it comes; a model without a tokenizer shows token ids. Ctrl-C stops and leaves
    with exit code 130.
    """
    request = Request.of_options(options)
    asked = read_prompt(prompt, prompt_ids)
    with loaded(invocation, model) as running:
        started = time.perf_counter()
        _run(invocation.console, running, asked, request)
        took = time.perf_counter() - started
        invocation.console.document(_document(running, request, took))
        for line in _summary(running, request):
            invocation.console.note(line)
    return INTERRUPTED if request.interrupted else 0


def _run(console: Console, model: Model, prompt: str | tuple[int, ...], request: Request) -> None:
    plain_ids = model.tokenizer is None

    def show(token: int | None, text: str) -> None:
        console.text(f"{token} " if plain_ids and token is not None else text)

    events = iter(
        model.generate(
            prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
            ignore_eos=request.ignore_eos,
        )
    )
    request.follow(events, show, console.progress())
    console.line()


def _document(model: Model, request: Request, took: float) -> dict[str, Any]:
    done = request.finished
    return {
        "text": request.answer,
        "token_ids": list(done.token_ids) if done else request.token_ids,
        "reason": done.reason if done else "cancelled",
        "prompt_tokens": done.prompt_tokens if done else request.prompt_tokens,
        "first_logits_sha256": done.first_logits_sha256 if done else None,
        **facts(model),
        "timings": {
            "load_s": model.timings["load_s"],
            "prompt_s": done.prompt_s if done else None,
            "decode_s": done.decode_s if done else None,
            "rounds": done.rounds if done else None,
            "total_s": took,
        },
    }


def _summary(model: Model, request: Request) -> list[str]:
    done = request.finished
    if done is None:
        line = f"interrupted after {len(request.token_ids)} tokens"
    else:
        line = f"prompt {_rate(done.prompt_tokens, done.prompt_s)}"
        # The first token comes out of the prompt's last round.
        if len(done.token_ids) > 1:
            line += f", then {_rate(len(done.token_ids) - 1, done.decode_s)}"
        line += f" ({done.reason})"
    line += f"; loaded in {model.timings['load_s']:.2f} s; {chosen(model.selections)}"
    return [line, *notes(model)]


def _rate(tokens: int, seconds: float) -> str:
    word = "token" if tokens == 1 else "tokens"
    return f"{tokens} {word}" + (f" at {tokens / seconds:.1f}/s" if seconds > 0 else "")
