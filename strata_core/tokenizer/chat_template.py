"""How a model wants a conversation written: its Jinja template, rendered safely."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import frozen

from strata_core.errors import CheckpointError, StrataError, UsageError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SOURCE = 1 << 20
"""Most characters of a template; published ones stay below 30,000."""


class NoChatTemplate(UsageError):
    """The model does not say how a conversation is written. Exit code 2."""


class TemplateRefusal(Exception):
    """What a template's own `raise_exception` raises; becomes a UsageError."""


@frozen(eq=False, slots=False)
class ChatTemplate:
    """One template with the special tokens it may name. Immutable; any thread may render it.

    `origin` is the file that it comes from, for errors. Template text is data from a model file:
    it runs in a sandbox with a time limit and size limits (see `template_sandbox`).
    """

    origin: str
    source: str
    special: Mapping[str, str]

    def render(self, **variables: Any) -> str:
        """The rendered text. `variables` are what the template sees, messages among them.

        Raises UsageError where the template itself refuses the conversation, CheckpointError where
        it fails or exceeds a limit.
        """
        from strata_core.tokenizer.sandbox import render

        known = {"tools": None, "documents": None, **self.special, **variables}
        try:
            return render(self._template, known)
        except TemplateRefusal as error:
            raise UsageError(
                "the model's chat template refuses this conversation",
                _one_line(error),
                "change the messages' roles or contents",
            ) from error
        except StrataError:
            raise
        except Exception as error:  # a template can raise anything
            raise self._failed(error) from error

    @cached_property
    def _template(self) -> Template:
        from strata_core.tokenizer.sandbox import compile_template

        if len(self.source) > MAX_SOURCE:
            raise CheckpointError(
                f"{self.origin}: the chat template is too long",
                f"{len(self.source)} characters, at most {MAX_SOURCE} are read",
                "use plain text generation",
            )
        try:
            return compile_template(self.source)
        except Exception as error:  # the compiler evaluates constants
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        return CheckpointError(
            f"{self.origin}: the chat template fails{where}",
            f"{type(error).__name__}: {_one_line(error)}",
            "use plain text generation, or a corrected template",
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
