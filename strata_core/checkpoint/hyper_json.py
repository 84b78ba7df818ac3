"""A model's sizes as JSON, for the manifest of a pack: every number comes back as it was."""

from __future__ import annotations

from typing import Any

from attrs import asdict, fields

from strata_core.checkpoint.config_json import Config
from strata_core.checkpoint.hyper import Hyper, Rope
from strata_core.checkpoint.hyper_check import check_hyper
from strata_core.checkpoint.roles import FAMILIES


def hyper_to_json(hyper: Hyper) -> dict[str, Any]:
    """The sizes as a JSON object with the record's own names; `rope` is an object within it."""
    document = asdict(hyper)
    document["dense_layers"] = sorted(hyper.dense_layers)
    document["eos"] = list(hyper.eos)
    return document


def hyper_from_json(config: Config) -> Hyper:
    """What `hyper_to_json` made, with every size checked. Raises CheckpointError naming field."""
    _check_complete(config, Hyper)
    family = config.text("family")
    if family not in FAMILIES:
        raise config.bad("family", f"{family[:60]!r} is unknown; known are {', '.join(FAMILIES)}")
    hyper = Hyper(
        family=family,
        name=config.text("name"),
        layers=config.integer("layers"),
        hidden=config.integer("hidden"),
        vocabulary=config.integer("vocabulary"),
        context=config.integer("context"),
        heads=config.integer("heads"),
        kv_heads=config.integer("kv_heads"),
        head_dim=config.integer("head_dim"),
        rope=_rope(config),
        norm_eps=config.real("norm_eps"),
        experts=config.integer("experts"),
        top_k=config.integer("top_k"),
        expert_ffn=config.integer("expert_ffn"),
        dense_ffn=config.integer("dense_ffn"),
        renormalise=_flag(config, "renormalise"),
        shared_ffn=config.integer("shared_ffn"),
        dense_layers=frozenset(config.integers("dense_layers")),
        tied=_flag(config, "tied"),
        sliding_window=_optional(config, "sliding_window"),
        bos=_optional(config, "bos"),
        eos=tuple(config.integers("eos")),
    )
    check_hyper(hyper, config.bad)
    if any(not 0 <= layer < hyper.layers for layer in hyper.dense_layers):
        raise config.bad("dense_layers", f"the model has the layers 0 to {hyper.layers - 1}")
    return hyper


def _rope(config: Config) -> Rope:
    rope = config.section("rope")
    if rope is None:
        raise config.bad("rope", "an object is expected")
    _check_complete(rope, Rope)
    scaling = rope.text("scaling")
    if scaling not in ("none", "linear", "yarn"):
        raise config.bad("rope.scaling", f"{scaling[:60]!r} is none of none, linear, yarn")
    _, attention = rope.get("attention_factor")
    return Rope(
        theta=rope.real("theta"),
        dim=rope.integer("dim"),
        scaling=scaling,  # type: ignore[arg-type]  # checked above
        factor=rope.real("factor"),
        original_context=rope.integer("original_context"),
        beta_fast=rope.real("beta_fast"),
        beta_slow=rope.real("beta_slow"),
        attention_factor=None if attention is None else rope.real("attention_factor"),
    )


def _check_complete(config: Config, record: type[Hyper | Rope]) -> None:
    """Every field is there, also one that may be null: none is left to a default unseen."""
    for field in fields(record):
        if field.name not in config.values:
            raise config.bad(field.name, "the field is missing")


def _flag(config: Config, key: str) -> bool:
    if config.get(key)[1] is None:
        raise config.bad(key, "true or false is expected")
    return config.flag(key, False)


def _optional(config: Config, key: str) -> int | None:
    _, value = config.get(key)
    return None if value is None else config.integer(key)
