"""The command `strata-zstd`: convert a pack, or measure one that was converted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strata_core.errors import StrataError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser("strata-zstd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="write a pack with compressed experts")
    convert.add_argument("pack", type=Path, metavar="PACK")
    convert.add_argument("out", type=Path, metavar="OUT")
    convert.add_argument("--level", type=int, default=3, choices=range(1, 20), metavar="1..19")
    measure = commands.add_parser("measure", help="say how fast experts are decompressed")
    measure.add_argument("pack", type=Path, metavar="PACK")
    for command in (convert, measure):
        command.add_argument("--threads", type=int, default=0, metavar="N")
    given = parser.parse_args(arguments)
    try:
        _convert(given) if given.command == "convert" else _measure(given)
    except StrataError as error:
        print(f"strata-zstd: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _convert(given: argparse.Namespace) -> None:
    from strata_source_zstd.convert import convert

    done = convert(
        given.pack,
        given.out,
        level=given.level,
        threads=given.threads,
        report=lambda line: print(line, file=sys.stderr),
    )
    print(
        f"{done.raw} bytes of experts became {done.packed}, {done.ratio:.1%}, "
        f"in {done.seconds:.1f} s, {done.raw / done.seconds / 1e6:.0f} MB/s"
    )


def _measure(given: argparse.Namespace) -> None:
    from strata_source_zstd.convert import measure

    found = measure(given.pack, given.threads)
    print(
        f"{found.packed / found.raw:.1%} of {found.raw} bytes; decompressed at "
        f"{found.one_thread / 1e6:.0f} MB/s by one thread, "
        f"{found.all_threads / 1e6:.0f} MB/s by {found.threads}; "
        f"{found.processor / 1e6:.0f} MB for each second of processor time"
    )


def run() -> None:
    """Entry point of the script."""
    sys.exit(main())
