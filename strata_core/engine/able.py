"""What a backend can do against what a model and its user ask, and an allocator's wishes."""

from __future__ import annotations

from collections.abc import Collection

from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings
from strata_core.errors import Degradation, PluginError, UsageError
from strata_core.interfaces import Allocator, Capabilities, StartPolicy
from strata_core.selection import Selection


def choose_kv(asked: str | None, capabilities: Capabilities, backend: str) -> str:
    """The KV type asked for, else the backend's default. Raises UsageError."""
    if asked is None:
        return capabilities.kv_types[0]
    if asked not in capabilities.kv_types:
        raise UsageError(
            f"--kv {asked} cannot be used with backend {backend}",
            f"it keeps keys and values as {', '.join(capabilities.kv_types)}",
            "leave --kv out to get the backend's default",
        )
    return asked


def unused_plugin_settings(
    settings: Settings, selections: Collection[Selection]
) -> tuple[Degradation, ...]:
    """A degradation for each setting of a plugin of which nothing was chosen.

    Raises UsageError where a flag or an argument gave the setting.
    """
    used = {selection.distribution for selection in selections}
    found = []
    for setting in settings.table.plugged:
        if setting.key not in settings.given() or setting.distribution in used:
            continue
        origin = settings.origin(setting.key)
        why = f"nothing that was chosen comes from {setting.origin}, which declares it"
        if origin.startswith(("flag", "argument")):
            raise UsageError(
                f"{origin.split(' ', 1)[-1]} has no effect here",
                why,
                "leave it out, or name what is to be used with --source, --allocator or --backend",
            )
        found.append(
            Degradation(
                what=f"{setting.key} ({origin}) has no effect",
                why=why,
                cost="what it was meant to set is as if it were not given",
                remedy="remove it, or name what is to be used with --source",
            )
        )
    return tuple(found)


def check_weight_types(checkpoint: Checkpoint, capabilities: Capabilities, backend: str) -> None:
    """Raises UsageError where the backend has no kernels for one of the model's weight types."""
    if capabilities.types is None:
        return
    stored = {t.type.name for t in checkpoint.tensors.values()}
    stored |= {p.type for layout in checkpoint.experts.layouts.values() for p in layout.parts}
    missing = sorted(stored - capabilities.types)
    if missing:
        raise UsageError(
            f"backend {backend} cannot compute with {checkpoint.path}",
            f"it has no kernels for weights of type {', '.join(missing)}",
            "choose another backend, or a model with other weight types",
        )


def check_built(
    checkpoint: Checkpoint, kv_type: str, capabilities: Capabilities, backend: str
) -> None:
    """Check a built backend, which may offer less than its record, against what was planned.

    Raises UsageError.
    """
    here = f"{backend} on this machine"
    check_weight_types(checkpoint, capabilities, here)
    if kv_type not in capabilities.kv_types:
        kept = ", ".join(capabilities.kv_types)
        raise UsageError(
            f"backend {here} cannot keep keys and values as {kv_type}",
            f"it keeps them as {kept or 'nothing'}, less than its plugin offers elsewhere",
            f"give --kv {capabilities.kv_types[0]}" if kept else "choose another backend",
        )


def checked_policy(allocator: Allocator, part: Selection) -> StartPolicy:
    """The allocator's start policy. Raises PluginError where it is none."""
    policy: object = allocator.start_policy
    if isinstance(policy, StartPolicy):
        return policy
    raise PluginError(
        f"allocator {part.name!r} cannot be used",
        f"its start_policy is a {type(policy).__name__}, not a StartPolicy",
        f"tell {part.distribution} {part.version}'s authors, or choose another with --allocator",
    )


def unmet_wishes(policy: StartPolicy, name: str) -> tuple[Degradation, ...]:
    """A degradation for each wish that a backend which places nothing step by step cannot meet.

    Small pinned buffers come first by themselves: such a backend has none.
    """
    plain = StartPolicy()
    wishes = {
        "contexts_first": ("devices' contexts before all else", "contexts open as they are needed"),
        "pin_limit": (f"a limit of {policy.pin_limit} pinned bytes", "it counts no pinned bytes"),
        "embedding": (
            f"the token embedding in {policy.embedding} memory",
            "it is placed with the other dense weights",
        ),
    }
    return tuple(
        Degradation(
            what=f"allocator {name} asks for {wish}, which this backend does not do",
            why=instead,
            cost="a driver that grants little pinned memory may refuse a later part of the start",
            remedy="choose another with --allocator if the start fails, or another --backend",
        )
        for field, (wish, instead) in wishes.items()
        if getattr(policy, field) != getattr(plain, field)
    )
