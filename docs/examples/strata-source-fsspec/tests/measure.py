"""Measure the source over a local HTTP server: MB/s, and what it survives.

    python tests/measure.py PACK

The server runs in a process of its own. Every expert is fetched once: by plain requests of 16 MiB
over one connection, by the source, and by the source while every other request fails, each way of
failing in turn. Prints one line each, the bytes of every expert compared with the pack's.
"""

from __future__ import annotations

import http.client
import itertools
import multiprocessing
import sys
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from unreliable_server import serving

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import AllocatorContext, BackendContext, Expert, SourceContext
from strata_core.machine import read_machine
from strata_core.memory.address import bytes_at
from strata_core.plugins import load_plugins
from strata_core.testing.conformance.memory import Silent
from strata_source_fsspec.command import mirror
from strata_source_fsspec.source import build

CHUNK = 16 << 20
FAULTS = ("drop", "cut", "spoil", "short", 503, "slow")
OPTIONS = {"fsspec_timeout": 3.0, "fsspec_retries": 8}


def serve(folder: Path, faulty: bool, pipe: Connection) -> None:
    """Serve a pack until told to end; then say how many requests failed, and of how many."""
    with serving(folder) as state:
        if faulty:
            for fault in itertools.islice(itertools.cycle(FAULTS), 10_000):
                state.faults += [None, fault]
        before = sum(fault is not None for fault in state.faults)
        pipe.send(state.url)
        pipe.recv()
        pipe.send((before - sum(fault is not None for fault in state.faults), len(state.ranges)))


def plain(url: str) -> tuple[int, float]:
    """Bytes and seconds of experts.bin by plain requests, one after the other."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("HEAD", "/experts.bin")
    answer = connection.getresponse()
    answer.read()
    size, begin = int(answer.headers["Content-Length"]), time.perf_counter()
    for start in range(0, size, CHUNK):
        last = min(start + CHUNK, size) - 1
        connection.request("GET", "/experts.bin", headers={"Range": f"bytes={start}-{last}"})
        connection.getresponse().read()
    return size, time.perf_counter() - begin


def by_source(url: str, pack: Path) -> tuple[int, float]:
    """Bytes and seconds of all experts by the source; raises where one is wrong."""
    found = load_plugins([])
    with tempfile.TemporaryDirectory() as temporary:
        mirror(url, Path(temporary) / "mirror")
        checkpoint, original = open_checkpoint(Path(temporary) / "mirror"), open_checkpoint(pack)
        machine = read_machine()
        given = {"machine": machine, "options": OPTIONS, "degrade": print}
        backend = found.backend("reference").record.build(BackendContext(**given))
        allocator = found.allocator("host").record.build(AllocatorContext(backend=backend, **given))
        context = SourceContext(
            experts=checkpoint.experts, allocator=allocator, progress=Silent(), **given
        )
        with closing(allocator), closing(build(context)) as source:
            begin, nbytes = time.perf_counter(), 0
            for layer, layout in checkpoint.experts.layouts.items():
                indices = range(checkpoint.experts.count)
                source.begin_layer(layer, indices)
                for index in indices:
                    source.view(Expert(layer, index))
                    nbytes += layout.nbytes
            seconds = time.perf_counter() - begin
            for layer, layout in checkpoint.experts.layouts.items():
                for index in range(checkpoint.experts.count):
                    expert = Expert(layer, index)
                    places = source.view(expert).parts
                    wanted = original.experts.mapped(expert)
                    for part, place, want in zip(layout.parts, places, wanted, strict=True):
                        assert (bytes_at(place, part.nbytes) == want).all(), expert
    return nbytes, seconds


def measure(pack: Path, label: str, faulty: bool) -> None:
    """One line: the label, bytes, MB/s, requests and those that failed."""
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(pack, faulty, theirs), daemon=True)
    server.start()
    url = ours.recv()
    nbytes, seconds = plain(url) if label == "plain" else by_source(url, pack)
    ours.send("end")
    failed, requests = ours.recv()
    server.join()
    rate = nbytes / seconds / 1e6
    print(
        f"{label:22} {nbytes / 1e6:7.1f} MB in {seconds:6.2f} s, {rate:6.0f} MB/s; "
        f"{requests} requests, {failed} failed"
    )


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    folder = Path(sys.argv[1])
    measure(folder, "plain", faulty=False)
    measure(folder, "source", faulty=False)
    measure(folder, "source, 1 in 2 fails", faulty=True)
