"""A machine as JSON: what was recorded comes back, what is wrong is named, nothing is asked twice."""

from __future__ import annotations

import copy
import json
import threading

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import PluginError, UsageError
from strata_core.machine import Adapter, HugePages, Machine, read_machine

FULL = Machine(
    os="linux",
    release="5.15.167.4-microsoft-standard-WSL2",
    architecture="x86_64",
    python="CPython 3.12.4",
    logical_cores=24,
    physical_cores=12,
    ram_installed=48 << 30,
    ram_available=40 << 30,
    page_size=4096,
    wsl=2,
    container=("docker", "kubernetes"),
    cpu_model="A processor",
    cpu_flags=("avx2", "avx512_vnni"),
    cpu_quota=7.5,
    cgroup_memory_limit=16 << 30,
    cgroup_memory_room=9 << 30,
    memlock_limit=65536,
    huge_pages=HugePages(2 << 20, 8, 5, "madvise"),
    adapters=(Adapter("0x10ab", "0x00ff", "0000:65:00.0"), Adapter("0x8086", "0x1234")),
    kernel_log=True,
)


def never():
    raise AssertionError("a replayed machine asks nothing")


def test_every_field_is_filled_in_the_machine_that_is_tested():
    for item in attrs.fields(Machine):
        if item.name not in ("replayed", "observed"):
            assert getattr(FULL, item.name) not in (None, (), "", False), item.name


def test_all_facts_come_back_through_text():
    document = json.loads(json.dumps(FULL.to_json()))
    again = Machine.from_json(document)
    assert again == FULL
    assert again.replayed
    assert again.to_json() == document


def test_the_document_of_doctor_is_read_by_its_machine_member():
    assert Machine.from_json({"settings": [], "machine": FULL.to_json()}) == FULL


def test_this_computer_comes_back():
    here = read_machine()
    assert Machine.from_json(json.loads(json.dumps(here.to_json()))) == here


def test_an_observation_is_asked_once_and_replayed():
    machine = attrs.evolve(FULL, observed={})
    answers = iter([{"sizes": (1, 2)}])
    for _ in range(2):
        assert machine.observe("plugin:size", lambda: next(answers)) == {"sizes": [1, 2]}
    again = Machine.from_json(machine.to_json())
    assert again.observe("plugin:size", never) == {"sizes": [1, 2]}
    assert again.observe("plugin:other", never) is None


def test_an_answer_of_none_is_recorded_too():
    machine = attrs.evolve(FULL, observed={})
    assert machine.observe("key", lambda: None) is None
    assert machine.observe("key", never) is None
    assert machine.to_json()["observed"] == {"key": None}


@pytest.mark.parametrize("answer", [object(), {1, 2}, float("nan"), b"bytes"])
def test_an_answer_that_json_cannot_hold_is_an_error_naming_its_key(answer):
    machine = attrs.evolve(FULL, observed={})
    with pytest.raises(PluginError, match="'plugin:odd'"):
        machine.observe("plugin:odd", lambda: answer)
    assert machine.observed == {}


def test_a_question_that_fails_leaves_no_record():
    machine = attrs.evolve(FULL, observed={})
    with pytest.raises(OSError, match="gone"):
        machine.observe("key", lambda: (_ for _ in ()).throw(OSError("gone")))
    assert machine.observe("key", lambda: 3) == 3


def test_two_threads_get_the_first_answer():
    machine = attrs.evolve(FULL, observed={})
    meet = threading.Barrier(2)
    got = []

    def ask(value):
        meet.wait(5)
        return value

    threads = [
        threading.Thread(
            target=lambda value=value: got.append(machine.observe("key", lambda: ask(value)))
        )
        for value in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert got[0] == got[1] == machine.observed["key"]


def test_libraries_modules_and_paths_are_looked_up_live_and_recorded(tmp_path):
    machine = attrs.evolve(FULL, observed={})
    missing, there = str(tmp_path / "lib-nobody-has.so"), str(tmp_path)
    assert machine.find_library(missing) == ""
    assert machine.has_module("json") is True
    assert machine.has_module("a_module_that_nobody_has") is False
    assert machine.has_path(there) is True
    assert machine.has_path(missing) is False
    again = Machine.from_json(json.loads(json.dumps(machine.to_json())))
    assert again.find_library(missing) == ""
    assert again.find_library(missing, "lib-never-asked.so") is None
    assert (again.has_module("json"), again.has_path(missing)) == (True, False)
    assert (again.has_module("never_asked"), again.has_path("/never/asked")) == (None, None)


def test_find_library_takes_the_first_that_loads():
    recorded = {"library:a.so": False, "library:b.so": True, "library:c.so": True}
    machine = attrs.evolve(FULL, observed=recorded, replayed=True)
    assert machine.find_library("a.so", "b.so", "c.so") == "b.so"
    assert machine.find_library("unknown.so", "c.so") == "c.so"
    assert machine.find_library("a.so") == ""


def test_memory_is_what_the_cgroup_leaves_of_it():
    assert FULL.memory_installed == 16 << 30
    assert FULL.memory_available == 9 << 30
    free = attrs.evolve(FULL, cgroup_memory_limit=None, cgroup_memory_room=None)
    assert (free.memory_installed, free.memory_available) == (48 << 30, 40 << 30)


def changed(path: str, value: object) -> dict[str, object]:
    document = copy.deepcopy(FULL.to_json())
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return document


WRONG = [
    ("format", "other", "format"),
    ("format", KeyError, "format"),
    ("version", 2, "version"),
    ("version", True, "version"),
    ("more", 1, "more"),
    ("facts", [], "facts"),
    ("observed", [], "observed"),
    ("facts.os", KeyError, "facts.os"),
    ("facts.os", " ", "facts.os"),
    ("facts.colour", "red", "facts.colour"),
    ("facts.ram_installed", -1, "facts.ram_installed"),
    ("facts.ram_installed", "64 GiB", "facts.ram_installed"),
    ("facts.ram_installed", 1.5, "facts.ram_installed"),
    ("facts.ram_available", 2**63, "facts.ram_available"),
    ("facts.logical_cores", 0, "facts.logical_cores"),
    ("facts.logical_cores", True, "facts.logical_cores"),
    ("facts.page_size", 4095, "facts.page_size"),
    ("facts.wsl", 3, "facts.wsl"),
    ("facts.wsl", 1.0, "facts.wsl"),
    ("facts.wsl", True, "facts.wsl"),
    ("facts.cpu_quota", float("nan"), "facts.cpu_quota"),
    ("facts.cpu_quota", 0, "facts.cpu_quota"),
    ("facts.cpu_quota", 10**400, "facts.cpu_quota"),
    ("facts.cpu_flags", "avx2", "facts.cpu_flags"),
    ("facts.cpu_flags", ["avx2", 7], "facts.cpu_flags[1]"),
    ("facts.kernel_log", 1, "facts.kernel_log"),
    ("facts.huge_pages.size", 3, "facts.huge_pages.size"),
    ("facts.huge_pages.free", KeyError, "facts.huge_pages.free"),
    ("facts.huge_pages.kind", 1, "facts.huge_pages.kind"),
    ("facts.adapters.1.vendor", "10de", "facts.adapters[1].vendor"),
    ("facts.adapters.0.device", KeyError, "facts.adapters[0].device"),
    ("facts.adapters", [3], "facts.adapters[0]"),
]


@pytest.mark.parametrize(("path", "value", "named"), WRONG)
def test_what_is_wrong_is_named_with_file_and_field(path, value, named):
    with pytest.raises(UsageError) as caught:
        Machine.from_json(changed(path, value), "facts.json")
    assert caught.value.what == f"facts.json: {named} cannot be used"
    assert caught.value.exit_code == 2
    assert len(caught.value.why) < 250


def test_the_field_of_doctors_document_is_named_with_its_way():
    document = {"machine": changed("facts.wsl", 3)}
    with pytest.raises(UsageError, match=r"facts\.json: machine\.facts\.wsl cannot be used"):
        Machine.from_json(document, "facts.json")


@pytest.mark.parametrize("name", ["wsl", "container", "cpu_flags", "huge_pages", "adapters"])
def test_a_fact_that_may_be_unknown_can_be_left_out(name):
    machine = Machine.from_json(changed(f"facts.{name}", KeyError))
    assert getattr(machine, name) in (None, ())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["facts", "format"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(
    st.sampled_from([*FULL.to_json(), *(f"facts.{n}" for n in FULL.to_json()["facts"])]),
    json_values,
)
def test_any_value_anywhere_is_taken_or_a_usage_error(path, value):
    try:
        machine = Machine.from_json(changed(path, value), "facts.json")
    except UsageError as error:
        assert error.what.startswith(f"facts.json: {path}")
    else:
        assert Machine.from_json(machine.to_json()) == machine


@given(json_values)
def test_any_document_is_a_usage_error(document):
    with pytest.raises(UsageError, match="facts.json"):
        Machine.from_json(document, "facts.json")
