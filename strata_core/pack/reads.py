"""Checking blobs as a source reads them: all, a fixed sample, or none (`--verify-reads`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from attrs import frozen

from strata_core.checkpoint.packed import PackedExperts
from strata_core.config import Settings
from strata_core.errors import Degradation
from strata_core.interfaces import Expert, ExpertFiles

Mode = Literal["all", "sample", "off"]

SAMPLE = 64
"""One blob of so many is checked in a sample, besides the first of each layer."""


@runtime_checkable
class HashedExperts(Protocol):
    """What the experts of a pack can do besides `interfaces.ExpertFiles`."""

    def check_blob(self, expert: Expert, blob: memoryview) -> None:
        """Raise CheckpointError, naming expert, file and offset, unless `blob` has its hash."""


@frozen
class ReadCheck:
    """Which blobs to check, and how. Immutable; any thread may use it.

    A source calls `check` on what it has read before anything uses it. Nothing happens for a blob
    that is not chosen, or whose checkpoint holds no hashes.
    """

    mode: Mode
    hashed: HashedExperts | None

    @classmethod
    def of(cls, experts: ExpertFiles, options: Mapping[str, Any]) -> ReadCheck:
        """The check for the experts and the options that a source is built from."""
        found = experts if isinstance(experts, HashedExperts) else None
        return cls(options.get("verify_reads", "sample"), found)

    def wants(self, expert: Expert) -> bool:
        """Whether this expert's blob is to be checked; the same answer in every run."""
        if self.hashed is None or self.mode == "off":
            return False
        return self.mode == "all" or in_sample(expert)

    def check(self, expert: Expert, blob: memoryview) -> None:
        """Check a blob's bytes, without padding, if it is chosen. Raises CheckpointError."""
        if self.hashed is not None and self.wants(expert):
            self.hashed.check_blob(expert, blob)


def in_sample(expert: Expert) -> bool:
    """Whether a blob is one of the sample: each layer's first, and of the others one in 64.

    A checksum of layer and index spreads the sample over the layers and their experts.
    """
    if expert.index == 0:
        return True
    place = expert.layer.to_bytes(4, "little") + expert.index.to_bytes(4, "little")
    return zlib.crc32(place) % SAMPLE == 0


def reads_report(experts: ExpertFiles, mode: Mode) -> dict[str, Any]:
    """What was compared so far of a model's experts, as a member of a document.

    `mode` is what --verify-reads says. Blobs that were compared, and of them those that had another
    hash; both are None for a model without hashes.
    """
    compared = experts.compared if isinstance(experts, PackedExperts) else None
    return {
        "verify": mode,
        "compared": compared.blobs if compared else None,
        "damaged": compared.damaged if compared else None,
    }


def unchecked_reads(
    settings: Settings, experts: ExpertFiles, source: str
) -> tuple[Degradation, ...]:
    """What --verify-reads asked for and cannot be had; nothing where it was left to its default."""
    if settings.verify_reads == "off" or settings.origin("verify_reads") == "default":
        return ()
    if not isinstance(experts, HashedExperts):
        why, remedy = "the model holds no hashes", "use a pack of it: `strata pack`"
    elif source == "mmap":
        why = "a mapped file is read by the operating system, page by page"
        remedy = "choose another source, or check the whole pack with `strata verify`"
    else:
        return ()
    return (
        Degradation(
            what=f"--verify-reads {settings.verify_reads} checks nothing",
            why=why,
            cost="damaged bytes would be computed with",
            remedy=remedy,
        ),
    )
