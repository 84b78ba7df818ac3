"""Several named regions in one piece of memory, so that one allocation and one claim hold them."""

from __future__ import annotations

from attrs import define, field

ALIGNMENT = 256


@define(eq=False)
class Regions:
    """Names with sizes while it is filled, addresses once `base` is known. Sizes are bytes."""

    base: int | None = None
    nbytes: int = 0
    _starts: dict[str, int] = field(factory=dict, init=False)
    _sizes: dict[str, int] = field(factory=dict, init=False)

    def add(self, name: str, nbytes: int) -> None:
        """A region; a name that is there already keeps the larger size."""
        if self.base is not None:
            raise RuntimeError(f"region {name} was added after the memory was taken")
        if nbytes <= self._sizes.get(name, -1):
            return
        self._starts[name] = self.nbytes
        self._sizes[name] = nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def at(self, name: str) -> int:
        """Address of a region."""
        if self.base is None:
            raise RuntimeError("the memory of the regions was not taken yet")
        return self.base + self._starts[name]

    def size(self, name: str) -> int:
        """Bytes of a region, without what follows for alignment."""
        return self._sizes[name]
