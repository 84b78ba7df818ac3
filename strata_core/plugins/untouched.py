"""Whether a plugin replaced parts of the program while it loaded; what it replaced is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType

from attrs import field, frozen

_WATCHED = frozenset({"strata_core", "attr", "attrs", "click", "pluggy"}) | sys.stdlib_module_names
"""Top-level modules whose functions and classes everybody relies on."""

_PARTS = (FunctionType, BuiltinFunctionType, type)

_GONE = object()

_STREAMS = ("stdin", "stderr")


_METHODS = (*_PARTS, property, staticmethod, classmethod)


@frozen(eq=False)
class _Namespace:
    """A module or a class, and all that it held; `parts` are the types of what is put back.

    Thousands of names are looked at for each plugin, nearly all of them untouched: a namespace
    whose names and values are the same objects in the same order is passed over without a loop.
    """

    owner: ModuleType | type
    name: str
    parts: tuple[type, ...]
    before: Mapping[str, object]

    def put_back(self) -> Iterator[str]:
        """The names of those that are others now or gone; they are put back."""
        now = vars(self.owner).copy()
        if (
            len(now) == len(self.before)
            and all(map(is_, now, self.before))
            and all(map(is_, now.values(), self.before.values()))
        ):
            return
        for name, value in self.before.items():
            if now.get(name, _GONE) is not value and isinstance(value, self.parts):
                setattr(self.owner, name, value)
                yield f"{self.name}.{name}"


@frozen(eq=False)
class Program:
    """The functions and classes of the modules loaded so far: core's and the standard library's.

    Made before a plugin loads, asked afterwards, both in the same thread. Costs a
    millisecond. What a plugin changes elsewhere, or later, is not seen: a plugin is code that was
    installed to be trusted, and this finds mistakes.
    """

    _modules: dict[str, ModuleType] = field(init=False)
    _namespaces: list[_Namespace] = field(init=False)
    _streams: dict[str, object] = field(init=False)

    def __attrs_post_init__(self) -> None:
        modules = {
            name: module
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in _WATCHED and type(module) is ModuleType
        }
        object.__setattr__(self, "_modules", modules)
        namespaces = [item for name, module in modules.items() for item in _of_module(name, module)]
        object.__setattr__(self, "_namespaces", namespaces)
        object.__setattr__(self, "_streams", {name: getattr(sys, name) for name in _STREAMS})

    def put_back(self) -> list[str]:
        """Dotted names of what was replaced since, in order; all of it is as before again."""
        replaced = []
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
                replaced.append(name)
        for namespace in self._namespaces:
            replaced += namespace.put_back()
        for name, stream in self._streams.items():
            if getattr(sys, name, _GONE) is not stream:
                setattr(sys, name, stream)
                replaced.append(f"sys.{name}")
        return sorted(replaced)


def _of_module(name: str, module: ModuleType) -> Iterator[_Namespace]:
    """A module's namespace and, of core's own, those of the classes that it defines."""
    yield _Namespace(module, name, _PARTS, vars(module).copy())
    if name.partition(".")[0] != "strata_core":
        return
    for key, value in vars(module).copy().items():
        if isinstance(value, type) and value.__module__ == name:
            yield _Namespace(value, f"{name}.{key}", _METHODS, vars(value).copy())
