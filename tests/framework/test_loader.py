"""The loader against real entry points: what is sound is offered, what is broken is quarantined."""

from __future__ import annotations

import builtins
import importlib
import itertools
import json
import os
import re
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from strata_core import __version__
from strata_core.interfaces import API
from strata_core.plugins import Catalogue, load_plugins

BUILT_IN = {
    "backend": ["cpu", "reference", "sim"],
    "allocator": ["host", "sim-pinned"],
    "source": ["arena", "mmap", "sliced-pinned", "tiered-file"],
}


def among(role: str, *more: str) -> list[str]:
    """The built-in names of a role and more, as a catalogue lists them."""
    return sorted([*BUILT_IN[role], *more])


def names(catalogue: Catalogue, role: str) -> list[str]:
    return [offer.name for offer in catalogue.offers(role)]


def test_without_plugins_the_built_ins_are_offered_through_the_same_door():
    catalogue = load_plugins([])
    assert {role: names(catalogue, role) for role in BUILT_IN} == BUILT_IN
    assert catalogue.broken == ()
    assert {offer.origin for offer in catalogue.sources} == {f"strata-core {__version__}"}


def test_a_sound_plugin_is_offered_with_its_distribution_and_version(install):
    catalogue = load_plugins(install("good", version="3.1"))
    assert catalogue.broken == ()
    assert names(catalogue, "backend") == among("backend", "dummy")
    assert names(catalogue, "allocator") == among("allocator", "dummy-memory")
    assert names(catalogue, "source") == among("source", "dummy-source")
    offer = catalogue.backend("dummy")
    assert (offer.distribution, offer.version) == ("strata-dummy-good", "3.1")
    assert catalogue.allocator("dummy-memory").record.serves == ("dummy",)
    assert catalogue.source("dummy-source").record.claims("dummy-form") is True
    with pytest.raises(KeyError):
        catalogue.backend("dummy-memory")


HERE = rf"strata-core {re.escape(__version__)} has {API[0]}\.{API[1]}"
BROKEN = [
    ("import_error", "import", r"ModuleNotFoundError: No module named 'a_library_that_nobody_has'"),
    ("exits", "import", r"SystemExit: 3"),
    ("mistyped_hook", "hooks", r"PluginValidationError: unknown hook 'strata_backend' in .*"),
    ("wrong_arguments", "hooks", r"PluginValidationError: .*'machine'.* can not be found .*"),
    ("wrapper", "hooks", r"strata_backends is marked wrapper: a hook only returns its own list"),
    ("no_hooks", "hooks", r"it implements none of strata_backends, strata_allocators, .*"),
    ("raises", "call", r"strata_backends raised RuntimeError: two lines"),
    ("generator", "records", r"strata_backends returned a generator, not a list of BackendRecord"),
    ("returns_none", "records", r"strata_backends returned None, not a list of BackendRecord"),
    ("returns_tuple", "records", r"strata_backends returned a tuple, not a list of BackendRecord"),
    ("not_records", "records", r"item 1 of strata_backends is a str, not a BackendRecord"),
    ("wrong_role", "records", r"item 0 of strata_backends is a SourceRecord, not a BackendRecord"),
    (
        "wrong_field",
        "records",
        r"item 0 of strata_backends, named 'fielded': supersedes must be a tuple of names, not .*",
    ),
    (
        "wrong_api",
        "api",
        rf"backend 'from-the-future' is written for interface version 2\.0; {HERE}",
    ),
    (
        "newer_minor",
        "api",
        rf"backend 'from-next-year' is written for interface version 1\.99; {HERE}",
    ),
]


@pytest.mark.parametrize(("module", "stage", "error"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_plugin_is_quarantined_and_the_others_stay(install, module, stage, error):
    catalogue = load_plugins([*install(module), *install("good")])
    (broken,) = catalogue.broken
    assert broken.stage == stage
    assert re.fullmatch(error, broken.error), broken.error
    assert broken.distribution == f"strata-dummy-{module.replace('_', '-')}"
    assert (broken.version, broken.entry_point) == ("1.2", module.replace("_", "-"))
    assert names(catalogue, "backend") == among("backend", "dummy")


def test_the_stack_trace_of_an_import_error_is_kept(install):
    (broken,) = load_plugins(install("import_error")).broken
    assert "import a_library_that_nobody_has" in broken.trace


def test_ctrl_c_during_an_import_is_not_swallowed(install, monkeypatch):
    entry_points = install("good")

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(metadata.EntryPoint, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_plugins(entry_points)


def test_an_exception_that_cannot_be_shown_is_quarantined_too(install, monkeypatch):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    def load(self):
        raise Mute

    entry_points = install("good")
    monkeypatch.setattr(metadata.EntryPoint, "load", load)
    (broken,) = load_plugins(entry_points).broken
    assert broken.error == "Mute: (its text cannot be had)"


def test_an_api_failure_knows_its_records_and_an_import_failure_does_not(install):
    imported, api = load_plugins([*install("wrong_api"), *install("import_error")]).broken
    assert api.offered == (("backend", "from-the-future"),)
    assert [api.concerns(role) for role in BUILT_IN] == [True, False, False]
    assert imported.offered == ()
    assert all(imported.concerns(role) for role in BUILT_IN)


def test_a_name_offered_twice_belongs_to_neither(install):
    first, second = install("good", version="1.0"), install("duplicate", version="2.0")
    text = (
        "backend 'dummy' is offered by strata-dummy-duplicate 2.0 (duplicate) "
        "and by strata-dummy-good 1.0 (good)"
    )
    for entry_points in ([*first, *second], [*second, *first]):
        catalogue = load_plugins(entry_points)
        assert names(catalogue, "backend") == among("backend", "own")
        assert names(catalogue, "allocator") == among("allocator", "dummy-memory")
        assert [(item.distribution, item.stage, item.error) for item in catalogue.broken] == [
            ("strata-dummy-duplicate", "duplicate", text),
            ("strata-dummy-good", "duplicate", text),
        ]
        assert {item.offered for item in catalogue.broken} == {(("backend", "dummy"),)}


def test_the_catalogue_is_the_same_in_every_load_order(install):
    modules = ["good", "duplicate", "import_error", "generator", "slow_probe"]
    entry_points = [item for module in modules for item in install(module)]

    def load(order):
        catalogue = load_plugins(order)
        quarantined = [(item.distribution, item.stage, item.error) for item in catalogue.broken]
        return [names(catalogue, role) for role in BUILT_IN], quarantined

    expected = load(entry_points)
    assert len(expected[1]) == 4
    # one order in five of all: each plugin is in each place, before and after each other one
    for order in itertools.islice(itertools.permutations(entry_points), 0, None, 5):
        assert load(order) == expected


@pytest.mark.parametrize("name", ["exits", "strata-dummy-exits", "Strata_Dummy.Exits"])
def test_a_blocked_plugin_is_not_even_imported(install, name):
    catalogue = load_plugins([*install("exits"), *install("good")], blocked=["nobody", name])
    assert catalogue.broken == ()
    assert names(catalogue, "backend") == among("backend", "dummy")
    kept_out = {item.name: item.entry_points for item in catalogue.blocked}
    assert kept_out.pop("nobody") == ()
    assert list(kept_out.values()) == [("strata-dummy-exits: exits",)]


def test_what_a_plugin_prints_goes_to_stderr(install, capsys):
    load_plugins(install("prints"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "printed at import\nprinted by the hook\n"


def test_a_missing_stderr_does_not_matter(install, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert names(load_plugins(install("prints")), "backend") == among("backend", "talkative")


def test_an_entry_point_that_names_nothing_useful(install):
    install("good")
    lost = metadata.EntryPoint("lost", "strata_dummy.good:missing", "strata")
    nothing = metadata.EntryPoint("nothing", "strata_dummy.good:strata_backends.__doc__", "strata")
    first, second = load_plugins([nothing, lost]).broken
    assert (first.distribution, first.version) == ("(no distribution)", "?")
    assert first.error == "AttributeError: module 'strata_dummy.good' has no attribute 'missing'"
    assert second.error == "strata_dummy.good:strata_backends.__doc__ is None"


def test_installed_plugins_are_found_by_themselves(install):
    install("good")
    assert load_plugins().backend("dummy").origin == "strata-dummy-good 1.2"


def test_malformed_metadata_of_any_distribution_hides_nobody(install, tmp_path):
    install("good")
    for distribution, text in (
        ("strata-dummy-torn", "[strata]\nno equals sign here\n"),
        ("strata-dummy-foreign", "[console_scripts]\nnor here\n"),
    ):
        install("raises", distribution)
        folder = f"{distribution.replace('-', '_')}-1.2.dist-info"
        (tmp_path / "site" / folder / "entry_points.txt").write_text(text, "utf-8")
    with pytest.raises(Exception, match=r"missing|unpack|value"):
        metadata.entry_points(group="strata")
    catalogue = load_plugins()
    assert catalogue.backend("dummy").distribution == "strata-dummy-good"
    (broken,) = [item for item in catalogue.broken if "dummy" in item.distribution]
    assert (broken.distribution, broken.stage) == ("strata-dummy-torn", "metadata")
    assert broken.error.startswith("its entry points cannot be read: ")


def test_a_plugin_that_does_not_come_back_is_left_behind(install, monkeypatch):
    entry_points = install("good")
    gate = threading.Event()
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: gate.wait(120))
    (broken,) = load_plugins(entry_points, seconds=0.2).broken
    gate.set()
    assert (broken.stage, broken.error) == ("import", "it did not load within 0.2 s")
    assert (broken.distribution, broken.version) == ("strata-dummy-good", "1.2")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(json, "dumps"), (builtins, "sorted"), (Catalogue, "offers"), (sys, "stderr")],
)
def test_what_a_plugin_replaces_is_put_back(install, monkeypatch, owner, name):
    entry_points, before = install("good"), getattr(owner, name)

    def load(self):
        setattr(owner, name, None)
        return importlib.import_module("strata_dummy.good")

    monkeypatch.setattr(metadata.EntryPoint, "load", load)
    (broken,) = load_plugins(entry_points).broken
    assert getattr(owner, name) is before
    assert broken.stage == "changes"
    assert f".{name} of the program" in broken.error
    assert broken.offered[0] == ("backend", "dummy")


def test_the_current_folder_stays(install, monkeypatch, tmp_path):
    entry_points = install("good")
    monkeypatch.chdir(tmp_path)

    def load(self):
        os.chdir("/")
        return importlib.import_module("strata_dummy.good")

    monkeypatch.setattr(metadata.EntryPoint, "load", load)
    assert load_plugins(entry_points).broken == ()
    assert Path.cwd() == tmp_path
