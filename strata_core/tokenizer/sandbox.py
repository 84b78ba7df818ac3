"""A Jinja environment for templates that come with a model and are not to be trusted.

Jinja's sandbox keeps a template from reaching Python's insides and from changing its input. It does
not bound what a template costs, so here every loop step, call and filter looks at the processor
time of its thread (a busy or a stopped machine is not the template's fault), and everything that
makes long texts or lists is measured before it is made. The dialect is that of transformers:
trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and a `generation` block that changes nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from attrs import frozen
from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata_core.tokenizer.chat_template import TemplateRefusal

SECONDS = 5.0
"""Processor time that a template may take."""
MAX_TEXT = 1 << 22
"""Most characters that a template may add to those of its input, in a value or in the output."""
MAX_ITEMS = 1 << 17
MAX_NUMBER = 1 << 17
"""Largest whole number that a template may pass to a call or a filter (widths, counts, ranges)."""

_FILTERS = frozenset(
    (
        *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e"),
        *("escape", "first", "float", "format", "groupby", "indent", "int", "items", "join"),
        *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
        *("replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort"),
        *("string", "sum", "title", "trim", "unique", "upper", "urlencode"),
    )
)
_BARRED_METHODS = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map")
)
_WIDE_FIELD = re.compile(r"\d{5}|\*")


@frozen
class _Limits:
    deadline: float
    text: int

    def spend(self) -> None:
        if time.thread_time() > self.deadline:
            raise SecurityError(f"it ran longer than {SECONDS:g} s")

    def length(self, characters: int) -> None:
        self.spend()
        if characters > self.text:
            raise SecurityError(f"it makes a text of more than {self.text} characters")


_current: ContextVar[_Limits] = ContextVar("template_limits")


@contextmanager
def _limited(text: int) -> Iterator[None]:
    token = _current.set(_Limits(time.thread_time() + SECONDS, MAX_TEXT + text))
    try:
        yield
    finally:
        _current.reset(token)


def compile_template(source: str) -> Template:
    """The template, ready to render. Raises what Jinja raises, SecurityError for a limit."""
    with _limited(0):
        return _Sandbox().from_string(source)


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The rendered text; at most `MAX_TEXT` characters more than those of `variables`."""
    with _limited(4 * _characters(variables)):
        parts: list[str] = []
        total = 0
        for part in template.generate(**variables):
            total += len(part)
            _current.get().length(total)
            parts.append(part)
        return "".join(parts)


def _characters(value: object) -> int:
    """Characters of all texts in nested lists and dictionaries."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(k) + _characters(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        kept = {name: _measured(name, self.filters[name]) for name in _FILTERS}
        self.filters = {
            **kept,
            "tojson": _to_json,
            "strata_loop": _watched,
            "strata_concat": _concatenate,
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "joiner": self.globals["joiner"],
            "cycler": self.globals["cycler"],
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(str(form)[:100]),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _through("strata_loop", loop.iter)
        _replace_concatenations(tree)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in the sandbox, and without text methods whose result has any length one asks for."""
        if isinstance(obj, str) and attr in _BARRED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """An attribute that may not be read ends the template instead of showing as nothing."""
        raise SecurityError(f"it reads the attribute {attribute!r} of a {type(obj).__name__}")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        owner, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
        _check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str):
            args = _check_method(owner, name, args)
        return _check_result(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make something large; measured first."""
        if operator == "**":
            if not _small(left, 1 << 64) or not _small(right, 64):
                raise SecurityError("it raises to a power beyond the limit")
        elif operator == "*":
            sizes = [len(x) if hasattr(x, "__len__") else x for x in (left, right)]
            if not all(_small(size, 1 << 64) for size in sizes):
                raise SecurityError("it multiplies beyond the limit")
            if any(hasattr(x, "__len__") for x in (left, right)):
                _current.get().length(int(sizes[0] * sizes[1]))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _current.get().length(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _check_result(super().call_binop(context, operator, left, right))


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _replace_concatenations(node: nodes.Node) -> None:
    """Turn every `a ~ b` into a filter that measures before it joins."""
    for field, value in node.iter_fields():
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_concatenations(item)
            if isinstance(item, nodes.Concat):
                parts = nodes.List(item.nodes, lineno=item.lineno)
                joined = _through("strata_concat", parts)
                if isinstance(value, list):
                    value[index] = joined
                else:
                    setattr(node, field, joined)


def _watched(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop; the clock is looked at before each."""
    limits = _current.get()
    for count, item in enumerate(items):
        if count >= MAX_ITEMS:
            raise SecurityError(f"a loop has more than {MAX_ITEMS} steps")
        limits.spend()
        yield item


def _concatenate(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _current.get().length(sum(map(len, texts)))
    return "".join(texts)


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are checked; Jinja's markers on it are kept."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        marked = 1 if hasattr(function, "jinja_pass_arg") else 0
        head, value, rest = args[:marked], args[marked], args[marked + 1 :]
        _check_numbers((*rest, *kwargs.values()))
        if name == "join" and not isinstance(value, str):
            value = list(value)
            separator = str(rest[0] if rest else kwargs.get("d", ""))
            _check_joined(separator, value)
        if name == "replace" and len(rest) >= 2:
            _check_replaced(str(value), str(rest[0]), str(rest[1]))
        if name == "format":
            _check_format(str(value))
        if name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            size = len(width) if isinstance(width, str) else int(width)
            _current.get().length(len(str(value)) + str(value).count("\n") * size)
        return _check_result(function(*head, value, *rest, **kwargs))

    if hasattr(function, "jinja_pass_arg"):
        checked.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return checked


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name == "join" and args and not isinstance(args[0], str):
        args = (list(args[0]), *args[1:])
        _check_joined(owner, args[0])
    elif name == "replace" and len(args) >= 2:
        _check_replaced(owner, str(args[0]), str(args[1]))
    elif name == "format":
        _check_format(owner)
    return args


def _check_joined(separator: str, items: list[Any]) -> None:
    total = sum(len(item) for item in items if isinstance(item, str))
    _current.get().length(total + len(separator) * len(items))


def _check_replaced(text: str, old: str, new: str) -> None:
    _current.get().length(len(text) + text.count(old) * len(new))


def _check_format(form: str) -> None:
    if _WIDE_FIELD.search(form):
        raise SecurityError("it formats to a width beyond the limit")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and not _small(value, MAX_NUMBER):
            raise SecurityError(f"it uses the number {str(value)[:20]}, beyond {MAX_NUMBER}")


def _small(value: Any, limit: int) -> bool:
    return not isinstance(value, int | float) or abs(value) <= limit


def _check_result(value: Any) -> Any:
    limits = _current.get()
    if isinstance(value, str):
        limits.length(len(value))
    elif isinstance(value, list | tuple) and len(value) > MAX_ITEMS + limits.text // 64:
        raise SecurityError(f"it makes a list of more than {MAX_ITEMS} items")
    else:
        limits.spend()
    return value


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers writes it: no HTML escapes, characters as they are."""
    _check_numbers([indent])
    kept = {k: options[k] for k in ("separators", "sort_keys", "ensure_ascii") if k in options}
    text = json.dumps(value, indent=indent, **{"ensure_ascii": False, **kept})
    _current.get().length(len(text))
    return text


def _refuse(message: str) -> None:
    raise TemplateRefusal(str(message))


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks text for training; rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
