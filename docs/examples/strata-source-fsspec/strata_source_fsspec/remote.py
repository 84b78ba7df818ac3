"""Ranges of a file that fsspec opens: bounded in time, tried again with growing pauses."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec
from attrs import frozen
from fsspec.asyn import sync

from strata_core.errors import StrataError, UsageError

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
_LASTING = (400, 401, 403, 404, 405, 410, 416)
"""HTTP answers that do not change when asked again."""


T = TypeVar("T")


class Broken(Exception):
    """An answer that is not what was asked for; another one may be."""


class NoRanges(Exception):
    """An answer of more than was asked for."""


@frozen
class Traffic:
    """Requests made, bytes received and kept, requests made again."""

    requests: int = 0
    nbytes: int = 0
    retries: int = 0


class Remote:
    """One file. Any thread may read; counts what it does.

    `url` is what fsspec takes, chains such as `zip://experts.bin::https://...` too; `options` are
    those of its file system.
    """

    def __init__(
        self,
        url: str,
        *,
        options: dict[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._retries, self._timeout, self._pause = retries, timeout, pause
        # Its own, so that pauses take nothing from the process's seeded generator.
        self._random = random.Random()  # noqa: S311 - no secret
        self._lock = threading.Lock()
        self._traffic = Traffic()
        try:
            self._files, self._path = fsspec.core.url_to_fs(url, **(options or {}))
        except Exception as error:  # whatever its file systems raise
            raise UsageError(
                f"{url} cannot be opened",
                _line(error),
                "check the address, its options and that fsspec has what its kind of address needs",
            ) from error

    @property
    def traffic(self) -> Traffic:
        """What was done so far."""
        return self._traffic

    def size(self) -> int:
        """The file's bytes. Raises StrataError."""
        what = f"the size of {self.url}"
        return int(self._again(what, lambda: self._call("size"), lambda _size: None))

    def read(
        self, start: int, end: int, what: str, check: Callable[[bytes], None] | None = None
    ) -> bytes:
        """The bytes from `start` to `end`. Raises StrataError naming `what`, address and range.

        An answer for which `check` raises Broken is asked for again, like one that is too short.
        """

        def checked(data: bytes) -> None:
            if len(data) > end - start:
                raise NoRanges(f"{len(data)} bytes came: the server does not heed ranges")
            if len(data) < end - start:
                raise Broken(f"{len(data)} bytes came instead of {end - start}")
            if check is not None:
                check(data)

        what = f"{what} (bytes {start} to {end})"
        data = self._again(
            what, lambda: bytes(self._call("cat_file", start=start, end=end)), checked
        )
        self._count(nbytes=len(data))
        return data

    def _again(self, what: str, ask: Callable[[], T], check: Callable[[T], None]) -> T:
        error: Exception | None = None
        for attempt in range(self._retries + 1):
            if attempt:
                self._count(retries=1)
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
                self._pause(longest * self._random.uniform(0.5, 1.0))
            self._count(requests=1)
            try:
                answer = ask()
                check(answer)
            except Exception as failure:  # noqa: BLE001 - file systems raise whatever they like
                error = failure
                if _lasts(failure):
                    break
            else:
                return answer
        tried = "once" if attempt == 0 else f"{attempt + 1} times"
        raise StrataError(
            f"cannot read {what} from {self.url}",
            f"tried {tried}: {_line(error)}",
            "check the address and the connection; --fsspec-retries and --fsspec-timeout bound it",
        ) from error

    def _call(self, name: str, **arguments: int) -> Any:
        """A call of the file system, bounded in time where it is an asynchronous one."""
        if not getattr(self._files, "async_impl", False):
            return getattr(self._files, name)(self._path, **arguments)
        request = getattr(self._files, f"_{name}")
        return sync(self._files.loop, request, self._path, timeout=self._timeout, **arguments)

    def _count(self, requests: int = 0, nbytes: int = 0, retries: int = 0) -> None:
        with self._lock:
            have = self._traffic
            self._traffic = Traffic(
                have.requests + requests, have.nbytes + nbytes, have.retries + retries
            )


def parse_options(text: str | None) -> dict[str, Any]:
    """The file system's options. Raises UsageError for what is no JSON object."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise _bad_options(str(error)) from error
    if not isinstance(found, dict):
        raise _bad_options(f"it is a {type(found).__name__}")
    return found


def _bad_options(why: str) -> UsageError:
    return UsageError(
        "STRATA_FSSPEC_OPTIONS is no JSON object", why, 'give e.g. {"anon": true}, or leave it out'
    )


def _lasts(error: Exception) -> bool:
    """Whether asking again would be answered alike."""
    if isinstance(error, NoRanges | FileNotFoundError | PermissionError | IsADirectoryError):
        return True
    return getattr(error, "status", None) in _LASTING


def _line(error: Exception | None) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
