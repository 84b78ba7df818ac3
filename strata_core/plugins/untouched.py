"""Whether a plugin replaced parts of the program while it loaded; what it replaced is put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType

from attrs import field, frozen

_WATCHED = frozenset({"strata_core", "attr", "attrs", "click", "pluggy"}) | sys.stdlib_module_names
"""Top-level modules whose functions and classes everybody relies on."""

_PARTS = (FunctionType, BuiltinFunctionType, type)

_GONE = object()

_STREAMS = ("stdin", "stderr")


@frozen(eq=False)
class _Namespace:
    """A module or a class, and its functions and classes as they were."""

    owner: ModuleType | type
    name: str
    before: Mapping[str, object]

    def put_back(self) -> Iterator[str]:
        """The names of those that are others now or gone; they are put back."""
        now = vars(self.owner)
        for name, value in self.before.items():
            if now.get(name, _GONE) is not value:
                setattr(self.owner, name, value)
                yield f"{self.name}.{name}"


@frozen(eq=False)
class Program:
    """The functions and classes of the modules loaded so far: core's and the standard library's.

    Made before a plugin loads, asked afterwards, both in the same thread. Costs a few
    milliseconds. What a plugin changes elsewhere, or later, is not seen: a plugin is code that was
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
    parts = {key: value for key, value in vars(module).items() if isinstance(value, _PARTS)}
    yield _Namespace(module, name, parts)
    if name.partition(".")[0] != "strata_core":
        return
    for key, value in parts.items():
        if isinstance(value, type) and value.__module__ == name:
            methods = {
                attribute: member
                for attribute, member in vars(value).items()
                if isinstance(member, (*_PARTS, property, staticmethod, classmethod))
            }
            yield _Namespace(value, f"{name}.{key}", methods)
