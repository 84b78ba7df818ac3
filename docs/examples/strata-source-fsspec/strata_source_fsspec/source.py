"""The source: neighbouring blobs are read with one request, each compared with its hash."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from strata_core.errors import CheckpointError, UsageError
from strata_core.interfaces import Expert, ExpertFiles, Source, SourceContext
from strata_core.sources.fetching import FetchingSource
from strata_source_fsspec.remote import Broken, Remote, parse_options

MANIFEST = "strata-pack.json"
ADDRESS = "experts.url"
LARGEST_REQUEST = 16 << 20
"""Bytes of one request at most, where it is for several blobs: more would hold the first one up."""

log = logging.getLogger("strata.source.fsspec")


class RangeFetcher:
    """Fetches blobs from a remote experts.bin; implements `strata_core.sources.fetching.Fetcher`.

    `digests` are the SHA-256 of each layer's blobs, as the pack's manifest has them: what comes
    over a network is compared with them always.
    """

    def __init__(
        self,
        remote: Remote,
        experts: ExpertFiles,
        digests: dict[int, list[str]],
        gap: int,
        largest: int = LARGEST_REQUEST,
    ) -> None:
        self._remote, self._experts, self._digests = remote, experts, digests
        self._gap, self._largest = gap, largest

    def groups(self, experts: Sequence[Expert]) -> Iterable[Sequence[Expert]]:
        """Runs of blobs with no more than the gap between them, up to the largest request."""
        runs: list[list[Expert]] = []
        begin = end = 0
        for expert in sorted(experts, key=self._range):
            start, stop = self._range(expert)
            if runs and start - end <= self._gap and stop - begin <= self._largest:
                runs[-1].append(expert)
            else:
                runs.append([expert])
                begin = start
            end = stop
        return runs

    def fetch(self, experts: Sequence[Expert], buffers: Sequence[memoryview]) -> None:
        """Read the run with one request. Raises StrataError naming the experts and the address."""
        ranges = [self._range(expert) for expert in experts]
        begin = min(start for start, _ in ranges)
        end = max(stop for _, stop in ranges)
        what = " and ".join(map(str, experts))

        def check(data: bytes) -> None:
            view = memoryview(data)
            for expert, (start, stop) in zip(experts, ranges, strict=True):
                digest = hashlib.sha256(view[start - begin : stop - begin]).hexdigest()
                if digest != self._digests[expert.layer][expert.index]:
                    raise Broken(f"{expert} does not have the hash that the pack has of it")

        data = memoryview(self._remote.read(begin, end, what, check))
        for (start, stop), buffer in zip(ranges, buffers, strict=True):
            buffer[:] = data[start - begin : stop - begin]

    def _range(self, expert: Expert) -> tuple[int, int]:
        gate, _, down = self._experts.pieces(expert)
        return gate.offset, down.offset + down.nbytes

    def close(self) -> None:
        """Say what was done."""
        done = self._remote.traffic
        log.info(
            "%s: %d requests, %d bytes, %d made again",
            self._remote.url,
            done.requests,
            done.nbytes,
            done.retries,
        )


def read_digests(folder: Path, experts: ExpertFiles) -> dict[int, list[str]]:
    """The blobs' hashes by layer, from the pack's manifest. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        layers = json.loads(path.read_bytes())["experts"]["layers"]
        found = {item["layer"]: list(item["blobs"]) for item in layers}
        whole = all(len(found[layer]) == experts.count for layer in experts.layouts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read", str(error), "mirror the pack again"
        ) from error
    if not whole:
        raise CheckpointError(f"{path} lacks hashes of experts", "", "mirror the pack again")
    return found


def _folder(experts: ExpertFiles) -> Path:
    gate, up, down = experts.pieces(Expert(min(experts.layouts), 0))
    folder = gate.file.parent
    together = gate.offset + gate.nbytes == up.offset and up.offset + up.nbytes == down.offset
    if {gate.file, up.file, down.file} != {folder / "experts.bin"} or not together:
        raise UsageError(
            f"{gate.file} is no pack",
            "the source fsspec reads the experts of packs",
            "make one with `strata pack`",
        )
    return folder


def _url(folder: Path, given: str | None) -> str:
    if given:
        return given
    try:
        return (folder / ADDRESS).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(
            "the source fsspec does not know where the experts are",
            f"there is no {folder / ADDRESS}",
            "give the address of experts.bin with --fsspec-url",
        ) from error


def build(context: SourceContext) -> Source:
    """The source of the record `fsspec`."""
    options = context.options
    folder = _folder(context.experts)
    digests = read_digests(folder, context.experts)
    remote = Remote(
        _url(folder, options.get("fsspec_url")),
        options=parse_options(options.get("fsspec_options")),
        retries=options.get("fsspec_retries", 5),
        timeout=options.get("fsspec_timeout", 30.0),
    )
    gap = options.get("fsspec_gap_kib", 64) << 10
    return FetchingSource(
        context,
        RangeFetcher(remote, context.experts, digests, gap),
        nbytes=int(options.get("fsspec_memory", 1.0) * 2**30),
        threads=options.get("fsspec_connections", 8),
        purpose="experts fetched from elsewhere",
    )
