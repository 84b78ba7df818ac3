"""Taking a cache's slots on one device: as many as are wished or fit, and empty ones to swap by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from strata_core.cache.amount import Wish, choose, no_spares
from strata_core.cache.slots import SlotPool, beside_spares, make_slots
from strata_core.errors import Degradation, Refused
from strata_core.interfaces import BlobLayout, Expert
from strata_core.memory.held import Held
from strata_core.plan.moving import spares_by_size


@frozen(eq=False)
class SlotRoom:
    """Where slots come from; `layouts` are the blobs' by layer, with `each` experts in a layer."""

    held: Held
    layouts: Mapping[int, BlobLayout]
    each: int

    def choose(self, device: int, wish: Wish, ranking: Sequence[Expert]) -> tuple[Expert, ...]:
        """The experts that a device is to hold, best first."""
        return choose(self.held.runtime, self.held.ledger, device, ranking, self.layouts, wish)

    def take(
        self,
        device: int,
        wish: Wish,
        ranking: Sequence[Expert],
        at_once: int,
        degrade: Callable[[Degradation], None],
    ) -> SlotPool:
        """Slots for the best of `ranking`, empty; `at_once`: swaps that may be under way together.

        Raises Refused, naming an amount that fits; then nothing is held. Where only the empty slots
        are refused, the cache does without them, and says so.
        """
        chosen = self.choose(device, wish, ranking)
        if wish.amount == "auto":
            chosen = beside_spares(chosen, self.layouts, self.each, at_once)
        spare = spares_by_size(chosen, self.layouts, self.each, at_once)
        if any(spare.values()):
            try:
                return make_slots(self.held, device, chosen, self.layouts, spare)
            except Refused as error:
                degrade(no_spares(f"{self.held.runtime.label}{device}", wish.flag, error))
        try:
            return make_slots(self.held, device, chosen, self.layouts)
        except Refused as error:
            fits = self.choose(device, Wish("auto", wish.reserve, wish.flag), ranking)
            raise Refused(
                f"{wish.flag} {wish.amount} does not fit: {error.what}",
                error.why,
                f"ask for {len(fits)} experts or fewer, or for auto",
            ) from error
