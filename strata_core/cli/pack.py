"""`strata pack`: a model written in the form that sources read best, with its hashes."""

from __future__ import annotations

import time
from pathlib import Path

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.words import size
from strata_core.errors import UsageError


@command("pack", [model_argument(), click.Argument(["out"], metavar="OUT")])
def command_object(invocation: Invocation, model: str, out: str) -> None:
    """Write MODEL as a pack, a folder named OUT.

    Weights keep their types and bytes, and prompts become the same tokens. A pack has each
    expert in one piece that can be read unbuffered, and a hash of everything, which `strata
    verify` and --verify-reads compare. OUT must not exist yet. It appears when it is whole; until
    then .OUT.partial beside it holds what has been written, and the same command given again goes
    on where an earlier one stopped.
    """
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.pack.write import write_pack

    if not out:
        raise UsageError("OUT is empty", "the pack needs a name", "give the path of a new folder")
    console = invocation.console
    checkpoint = open_checkpoint(model_path(model))
    began = time.perf_counter()
    progress = console.progress()
    try:
        packed = write_pack(checkpoint, Path(out), progress)
    finally:
        progress.close()
    took = time.perf_counter() - began
    manifest = packed.manifest
    nbytes = manifest.experts_bytes + manifest.dense_bytes
    blobs = sum(len(layer.digests) for layer in manifest.layers)
    console.document(
        {
            "model": model,
            "out": str(packed.path),
            "form": checkpoint.form,
            "model_hash": manifest.model_hash,
            "hash": "sha256",
            "bytes": nbytes,
            "experts": {"blobs": blobs, "bytes": manifest.experts_bytes},
            "dense": {"tensors": len(manifest.tensors), "bytes": manifest.dense_bytes},
            "files": [item.name for item in manifest.kept],
            "left_out": list(manifest.left_out),
            "already": packed.already,
            "resumed_bytes": packed.resumed,
            "timings": {"total_s": took},
        }
    )
    done = "is the finished pack of this model already" if packed.already else "written"
    console.line(f"{packed.path} {done}: {blobs} experts, {size(nbytes)}, {manifest.model_hash}")
    if manifest.left_out:
        console.note(f"not used by the model and left out: {', '.join(manifest.left_out)}")
    if packed.resumed and not packed.already:
        console.note(f"{size(packed.resumed)} were there from an earlier run, and are as they were")
