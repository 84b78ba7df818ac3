"""What the tiered file would do for a model on a machine, and the profile that it goes by."""

from __future__ import annotations

import logging
from pathlib import Path

from attrs import frozen

from strata_core.cache.profile import Profile, read_profile, write_profile
from strata_core.cache.rank import ranking, rates
from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings, cache_folder
from strata_core.errors import Degradation, StrataError, UsageError
from strata_core.interfaces import Expert
from strata_core.machine import Machine
from strata_core.plan.devices import Accelerator
from strata_core.plan.plan import Plan, Sizes
from strata_core.plan.tier import SOURCE, LowRam, rule
from strata_core.sources.tier_sizes import placings, ring_sizes

_LOG = logging.getLogger("strata.tier")


@frozen
class Known:
    """The profile that is gone by, if any, and the order of experts that it makes.

    `order` is None without a profile. `learned`: it was kept by earlier runs, not given.
    `damaged` says why one that was kept is of no use.
    """

    profile: Profile | None = None
    order: tuple[Expert, ...] | None = None
    learned: bool = False
    damaged: str = ""


def known_profile(checkpoint: Checkpoint, settings: Settings) -> Known:
    """The profile that was given, else the one that earlier runs left.

    Raises UsageError for a file that is no profile, or of another model.
    """
    layers, experts = list(checkpoint.experts.layouts), checkpoint.experts.count
    path: Path | None = settings.expert_profile
    learned = path is None
    profile, damaged = None, ""
    if path is not None:
        profile = read_profile(path)
        wrong = profile.fits(checkpoint.origin_hash, layers, experts)
        if wrong:
            raise UsageError(
                f"{path} is the profile of another model than {checkpoint.path}",
                wrong,
                "leave --expert-profile out, or make one with `strata profile`",
            )
    else:
        profile, damaged = recalled(checkpoint, settings)
    if profile is None:
        return Known(damaged=damaged)
    return Known(profile, ranking(profile, layers, experts), learned)


def learned_path(checkpoint: Checkpoint, settings: Settings) -> Path | None:
    """Where runs leave what they learned of a model; None where there is no folder for it."""
    folder = settings.cache_dir or cache_folder()
    return folder / "profiles" / f"{checkpoint.origin_hash}.json" if folder else None


def recalled(checkpoint: Checkpoint, settings: Settings) -> tuple[Profile | None, str]:
    """What earlier runs learned, None where there is nothing; and why what is there is of no use.

    A file of no use is written anew at the end of a run that learns.
    """
    path = learned_path(checkpoint, settings)
    if path is None or not path.is_file():
        return None, ""
    try:
        profile = read_profile(path)
    except StrataError as error:
        return None, f"{path}: {error.why}"
    experts = checkpoint.experts
    wrong = profile.fits(checkpoint.origin_hash, list(experts.layouts), experts.count)
    return (None, f"{path}: {wrong}") if wrong else (profile, "")


def unlearned(known: Known, plan: Plan) -> tuple[Degradation, ...]:
    """A degradation where a profile that was kept is of no use to a plan that would go by it."""
    if not known.damaged or not (plan.source == SOURCE or plan.caches):
        return ()
    return (
        Degradation(
            what="what earlier runs learned of the experts' use is ignored",
            why=known.damaged,
            cost="which experts are kept near is not chosen by use",
            remedy="delete the file, or give a profile with --expert-profile",
        ),
    )


def low_ram(
    checkpoint: Checkpoint,
    settings: Settings,
    machine: Machine,
    sizes: Sizes,
    accelerator: Accelerator | None,
    known: Known,
    source: str | None,
) -> LowRam:
    """What the planner has to know of the tiered file; `source` is the one that was asked for.

    Raises UsageError where it was asked for and cannot serve.
    """
    because = _because(settings, machine, sizes) if source is None else ""
    if not because and source != SOURCE:
        return LowRam()
    unmet = _unmet(accelerator)
    if unmet and source == SOURCE:
        raise UsageError(
            f"the source {SOURCE} ({settings.origin('source')}) cannot be used",
            unmet,
            "use one device with --device, or another source",
        )
    experts = checkpoint.experts
    placed = placings(experts)
    order = known.order or ranking(None, list(experts.layouts), experts.count)
    chosen = checkpoint.hyper.top_k / max(1, experts.count)
    return LowRam(
        because=because,
        unmet=unmet,
        cells=sum(each.nbytes for each in placed.values()),
        ring=sum(ring_sizes(experts, placed, (), moving=True)),
        rates=rates(known.profile, order, chosen),
        learned=known.profile is not None,
    )


def _because(settings: Settings, machine: Machine, sizes: Sizes) -> str:
    if settings.no_low_ram:
        return ""
    if settings.ram_budget is not None:
        return "the experts do not fit in --ram-budget"
    return rule(sizes.experts, machine.memory_installed)


def _unmet(accelerator: Accelerator | None) -> str:
    """Why the tiered file cannot serve these devices; "" where it can."""
    if accelerator is None or len(accelerator.devices) == 1:
        return ""
    names = ", ".join(device.label for device in accelerator.devices)
    return f"it serves one device without helpers, and {names} are used"


def learns(plan: Plan) -> bool:
    """Whether the next run can make use of what this one learns: by a tier, or a moving cache."""
    return plan.source == SOURCE or any(cache.spare for cache in plan.caches)


def keep_profile(
    checkpoint: Checkpoint, settings: Settings, known: Known, counted: Profile, *, learning: bool
) -> None:
    """Write what a run asked for: where the user wants it, and with `learning` for the next run.

    Raises StrataError where the user's file cannot be written.
    """
    if not counted.picks:
        return
    total = counted if known.profile is None else counted.plus(known.profile)
    if learning and settings.expert_profile is None:
        path = learned_path(checkpoint, settings)
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_profile(total, path)
        except (OSError, StrataError) as error:
            _LOG.warning("what was learned of the experts' use is not kept: %s", error)
    if settings.expert_profile_save is not None:
        write_profile(total, settings.expert_profile_save)
