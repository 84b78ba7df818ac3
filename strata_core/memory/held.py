"""Device and page-locked memory that one owner holds: each piece with its claim, freed together.

The ledger is asked first, then the driver. A refusal names the purpose and the device, and leaves
nothing behind: no claim, no pending error of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from attrs import define, field, frozen

from strata_core.errors import Refused, StrataError
from strata_core.memory.ledger import PINNED, Claim, Ledger, vram
from strata_core.runtime import Runtime

MIB = 1 << 20


@frozen(eq=False)
class _Piece:
    claim: Claim
    free: Callable[[], None]


@define(eq=False)
class Held:
    """Takes and frees; used by one thread at a time. Addresses are as the runtime gives them."""

    runtime: Runtime
    ledger: Ledger
    _pieces: dict[int, _Piece] = field(factory=dict, init=False)

    def device(self, device: int, nbytes: int, purpose: str) -> int:
        """Memory of a device, contents undefined. Raises Refused."""
        claim = self.ledger.take(vram(device), nbytes, purpose)

        def refusal(error: Refused) -> Refused:
            free = self.runtime.memory(device).free
            label = f"{self.runtime.label}{device}"
            return Refused(
                f"{label} has no {nbytes / MIB:.2f} MiB for {purpose}",
                f"{free / MIB:.2f} MiB of it are free; the driver says: {error.what}",
                "make --expert-cache, --max-context or --vram-budget smaller, or close other "
                "programs that use the device",
            )

        address = self._get(claim, lambda: self.runtime.alloc(device, nbytes), refusal)
        self._pieces[address] = _Piece(claim, lambda: self.runtime.free(device, address))
        return address

    def pinned(self, nbytes: int, purpose: str, *, small: bool = True) -> int:
        """Page-locked host memory, contents undefined. Raises Refused."""
        claim = self.ledger.take(PINNED, nbytes, purpose, small=small)

        def refusal(error: Refused) -> Refused:
            return Refused(
                f"{nbytes / MIB:.2f} MiB of page-locked memory for {purpose} were refused",
                f"the driver pins no more: {error.what}; "
                f"{self.ledger.used(PINNED) / MIB:.2f} MiB are pinned now",
                "pin less elsewhere: `strata doctor` says what this machine's driver pins",
            )

        address = self._get(claim, lambda: self.runtime.host_alloc(nbytes), refusal)
        self._pieces[address] = _Piece(claim, lambda: self.runtime.host_free(address))
        return address

    def release(self, address: int) -> None:
        """Give one piece back; work that uses it must have finished. After an error it is held."""
        piece = self._pieces[address]
        piece.free()
        piece.claim.release()
        del self._pieces[address]

    def close(self) -> None:
        """Give everything back, the newest first; the first error is raised at the end.

        What the driver does not take back is held no longer.
        """
        pieces, self._pieces = list(self._pieces.values()), {}
        undo_all(self.runtime, [partial(self._give_up, piece) for piece in reversed(pieces)])

    @staticmethod
    def _give_up(piece: _Piece) -> None:
        try:
            piece.free()
        finally:
            piece.claim.release()

    def _get(
        self, claim: Claim, ask: Callable[[], int], refusal: Callable[[Refused], Refused]
    ) -> int:
        try:
            return ask()
        except Refused as error:
            claim.release()
            self.runtime.take_error()
            raise refusal(error) from error
        except BaseException:
            claim.release()
            raise


def undo_all(runtime: Runtime, steps: Iterable[Callable[[], None]]) -> None:
    """Do every step, whatever fails; the first StrataError is raised at the end.

    The driver's pending error is taken first and after each failure: who met it was told of it, and
    it must not keep memory from being freed.
    """
    first: StrataError | None = None
    runtime.take_error()
    for step in steps:
        try:
            step()
        except StrataError as error:
            first = first or error
            runtime.take_error()
    if first is not None:
        raise first
