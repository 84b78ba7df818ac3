"""`strata perplexity`: how well a model predicts a text."""

from __future__ import annotations

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.loading import chosen, facts, loaded, notes
from strata_core.cli.prompt import read_text
from strata_core.cli.windows import run_text, text_options
from strata_core.setting_table import LOADING


@command(
    "perplexity",
    [
        model_argument(),
        *text_options(),
    ],
    LOADING,
)
def command_object(invocation: Invocation, model: str, text_file: str, context: int) -> None:
    """Measure how well MODEL predicts a text.

    The text is cut into windows of N tokens that do not overlap. The result is the mean negative
    log-likelihood of the tokens 2 to N of each window, and its exponential, the perplexity. Tokens
    at the end that fill no window are left out; a text shorter than N is one window.
    """
    text = read_text(text_file, "--text")
    console = invocation.console
    with loaded(invocation, model) as running:
        run = run_text(console, running, model, text, context, "perplexity")
        result = run.result
        console.line(
            f"perplexity {result.perplexity:.4f}, mean negative log-likelihood {result.nll:.6f} "
            f"over {result.tokens} tokens in {result.windows} windows of {context}"
            + (f"; {result.left_out} tokens at the end left out" if result.left_out else "")
        )
        console.document(
            {
                "nll": result.nll,
                "perplexity": result.perplexity,
                "tokens": result.tokens,
                "windows": result.windows,
                "left_out": result.left_out,
                "context": context,
                **facts(running),
                "timings": {"load_s": running.timings["load_s"], "total_s": run.seconds},
            }
        )
        console.note(f"{run.tokens / run.seconds:.1f} tokens/s; {chosen(running.selections)}")
        for line in notes(running):
            console.note(line)
