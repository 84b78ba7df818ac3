"""The reference models of a folder (kjv-moe/, tiny/), and which of them are there.

Their files may travel to a machine in parts: a check names what it leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

KJV = ("kjv-Q4_K_M.gguf", "kjv-Q8_0.gguf", "kjv-Q4_0.gguf", "kjv-MXFP4.gguf", "")
"""Variants of the one; "" is the hub's folder."""

TINY = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")
INDEX = "model.safetensors.index.json"


def kjv(folder: Path) -> list[Path]:
    """Every variant of kjv-moe."""
    return [folder / "kjv-moe" / name for name in KJV]


def tiny(folder: Path) -> list[Path]:
    """Every tiny model."""
    return [folder / "tiny" / name for name in TINY]


def missing(model: Path) -> str:
    """What of a model is not there, in words; "" where all of it is."""
    name = f"{model.parent.name}/{model.name}"
    if model.suffix == ".gguf":
        return "" if model.is_file() else f"{name} is not there"
    if not (model / "config.json").is_file():
        return f"{name} is not there"
    files = {path.name for path in model.glob("*.safetensors")}
    wanted = {"model.safetensors"}
    if (model / INDEX).is_file():
        wanted = set(json.loads((model / INDEX).read_text("utf-8"))["weight_map"].values())
    gone = sorted(wanted - files)
    return f"{name} lacks {gone[0]}" if gone else ""


def there(models: Iterable[Path]) -> tuple[list[Path], str]:
    """The models that are there, and what is to be said of the others ("" where there are none)."""
    found = {model: missing(model) for model in models}
    gone = ", ".join(model.name for model, why in found.items() if why)
    said = f"left out, not there: {gone}" if gone else ""
    return [model for model, why in found.items() if not why], said
