"""The command `strata-fsspec`: mirror a pack that lies elsewhere, all but its experts."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata_core.errors import StrataError, UsageError
from strata_source_fsspec.plugin import FORM
from strata_source_fsspec.remote import Remote, parse_options
from strata_source_fsspec.source import ADDRESS, MANIFEST

CHUNK = 8 << 20
_LARGEST_MANIFEST = 1 << 26
_KEPT = ".json", ".jinja", ".txt", ".gguf", ".model"


def mirror(url: str, out: Path, options: str | None = None) -> int:
    """Copy the pack at `url` to the new folder `out`, without experts.bin; returns the bytes.

    `url` is the folder's address. What a pack consists of, its manifest says. The folder takes its
    name when it is complete. Raises StrataError.
    """
    if out.exists():
        raise UsageError(f"{out} exists already", "nothing is overwritten", "name another OUT")
    base, mark, rest = _absolute(url).partition("::")
    base = base if base.endswith("/") else f"{base}/"

    def place(name: str) -> str:
        return f"{base}{name}{mark}{rest}"

    given = parse_options(options)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        manifest = _whole(Remote(place(MANIFEST), options=given))
        (partial / MANIFEST).write_bytes(manifest)
        total = len(manifest)
        for name, nbytes in _files(json.loads(manifest)):
            _copy(Remote(place(name), options=given), partial / name, nbytes)
            total += nbytes
        (partial / ADDRESS).write_text(place("experts.bin") + "\n", "utf-8")
        (partial / "experts.form").write_text(f"{FORM}\n", "utf-8")
        partial.rename(out)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{place(MANIFEST)} is not the manifest of a pack", str(error), "check the address"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return total


def _absolute(url: str) -> str:
    """The address, a path of this computer in it (the last of a chain) made absolute."""
    before, mark, last = url.rpartition("::")
    return f"{before}{mark}{last if '://' in last else Path(last).resolve()}"


def _files(manifest: dict[str, Any]) -> list[tuple[str, int]]:
    """Names and sizes of the files to copy; none may lead out of the folder."""
    found = [("dense.bin", manifest["dense"]["bytes"])]
    found += [(item["name"], item["bytes"]) for item in manifest["files"]]
    for name, nbytes in found:
        if (
            Path(name).name != name
            or not name.endswith((".bin", *_KEPT))
            or type(nbytes) is not int
        ):
            raise ValueError(f"{name!r} is no file of a pack")
    return found


def _whole(remote: Remote) -> bytes:
    size = remote.size()
    if size > _LARGEST_MANIFEST:
        raise ValueError(f"it has {size} bytes")
    return remote.read(0, size, "the manifest")


def _copy(remote: Remote, target: Path, nbytes: int) -> None:
    with target.open("xb") as file:
        for start in range(0, nbytes, CHUNK):
            file.write(remote.read(start, min(start + CHUNK, nbytes), target.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser("strata-fsspec", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("mirror", help="copy a pack without its experts")
    command.add_argument("url", metavar="URL", help="the address of the pack's folder")
    command.add_argument("out", type=Path, metavar="OUT")
    command.add_argument("--options", metavar="JSON", help="options of the file system")
    given = parser.parse_args(arguments)
    try:
        total = mirror(given.url, given.out, given.options)
    except StrataError as error:
        print(f"strata-fsspec: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{given.out}: {total} bytes copied, experts stay at {given.url}")
    return 0


def run() -> None:
    """Entry point of the script."""
    sys.exit(main())
