"""How the simulated driver words its errors: what failed, the driver's code, the rule behind it."""

from __future__ import annotations

from attrs import frozen

from strata_core.errors import DeviceError, Refused


@frozen
class Code:
    """An error of the driver: its number and its text, as real drivers give them."""

    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} (error {self.number})"


INVALID_VALUE = Code(1, "invalid value")
OUT_OF_MEMORY = Code(2, "out of memory")
SHUT_DOWN = Code(4, "driver shutting down")
INVALID_DEVICE = Code(101, "invalid device ordinal")
NO_CONTEXT = Code(201, "invalid device context")
ALREADY_MAPPED = Code(208, "resource already mapped")
INVALID_HANDLE = Code(400, "invalid resource handle")
NOT_FOUND = Code(500, "named symbol not found")
BUSY = Code(600, "not ready")
ILLEGAL_ADDRESS = Code(700, "illegal memory access")
ALREADY_PINNED = Code(712, "memory already registered")
LAUNCH_FAILED = Code(719, "unspecified launch failure")
BAD_CAPTURE = Code(900, "operation not permitted in this state of capture")
UNKNOWN = Code(999, "unknown error")


def broken(what: str, code: Code, why: str, remedy: str) -> DeviceError:
    """The error for a broken rule. `why` says the rule and what broke it."""
    return DeviceError(what, f"{code}: {why}", remedy)


def refused(what: str, why: str, remedy: str) -> Refused:
    """The error for memory that is not granted."""
    return Refused(what, f"{OUT_OF_MEMORY}: {why}", remedy)


def code_of(error: DeviceError) -> str:
    """The driver's part of an error that was made here: "out of memory (error 2)"."""
    return error.why.partition(":")[0] or str(UNKNOWN)


def size(nbytes: int) -> str:
    """A size for a message."""
    return f"{nbytes / (1 << 20):.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
