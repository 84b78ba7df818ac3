"""A machine's facts as JSON: round trip, replay, and errors that name file and field."""

from __future__ import annotations

import copy
import json
import threading

import pytest
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import PluginError, UsageError
from strata_core.machine import Adapter, HugePages, Machine, read_machine
from strata_core.machine.fields import FACTS

counts = st.integers(0, 2**62)
positive = st.integers(1, 2**62)
pages = st.sampled_from([4096, 16384, 1 << 21])
ids = st.integers(0, 0xFFFF).map("0x{:04x}".format)
words = st.text(min_size=1, max_size=8).filter(str.strip)
texts = st.lists(st.text(max_size=8), max_size=3).map(tuple)
machines = st.builds(
    Machine,
    os=words,
    release=st.text(max_size=8),
    architecture=words,
    python=st.text(max_size=8),
    logical_cores=positive,
    physical_cores=positive,
    ram_installed=positive,
    ram_available=counts,
    page_size=pages,
    wsl=st.sampled_from([None, 1, 2]),
    container=texts,
    cpu_model=st.text(max_size=8),
    cpu_flags=texts,
    cpu_quota=st.none() | st.floats(0.01, 1e3),
    cgroup_memory_limit=st.none() | counts,
    cgroup_memory_room=st.none() | counts,
    memlock_limit=st.none() | counts,
    huge_pages=st.none() | st.builds(HugePages, pages, counts, counts, st.text(max_size=8)),
    adapters=st.none()
    | st.lists(st.builds(Adapter, ids, ids, st.text(max_size=8)), max_size=2).map(tuple),
    kernel_log=st.booleans(),
)


@given(machines)
def test_a_recorded_machine_is_the_same_machine(machine):
    text = json.dumps(machine.to_json(), allow_nan=False)
    again = Machine.from_json(json.loads(text))
    assert again == machine
    assert again.replayed
    assert again.to_json() == machine.to_json()


def test_every_fact_is_in_the_document_and_has_a_parser(make_machine):
    facts = {item.name for item in fields(Machine)} - {"replayed", "observed"}
    assert set(make_machine().to_json()["facts"]) == facts == set(FACTS)


def test_this_machine_can_be_recorded_and_replayed():
    machine = read_machine()
    assert not machine.replayed
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_a_document_that_holds_the_machine_is_read_too(make_machine):
    report = {"settings": {}, "machine": make_machine().to_json(), "broken": []}
    assert Machine.from_json(report) == make_machine()


def test_facts_that_may_be_unknown_can_be_left_out(make_machine):
    document = make_machine().to_json()
    for name in ("wsl", "adapters", "cpu_flags", "huge_pages", "kernel_log"):
        del document["facts"][name]
    del document["observed"]
    assert Machine.from_json(document) == make_machine(adapters=None)


def change(*path_and_value):
    *path, value = path_and_value

    def apply(document):
        place = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return apply


def remove(*path):
    def apply(document):
        place = document
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return apply


COUNT = "a whole number, 0 or more"
COUNT_1 = "a whole number, 1 or more"
ADAPTER = "an object with vendor, device, address"
PCI = '"0x" and four lower-case hexadecimal digits'
WRONG = [
    (change("format", "something"), "format", "expected \"strata-machine\"; found 'something'"),
    (remove("format"), "format", 'expected "strata-machine"; found None'),
    (change("version", 2), "version", "expected 1; found 2"),
    (change("version", True), "version", "expected 1; found True"),
    (change("extra", 1), "extra", "expected format, version, facts or observed; found 'extra'"),
    (remove("facts"), "facts", "expected an object; found None"),
    (change("observed", []), "observed", "expected an object; found []"),
    (
        change("facts", "rams", 1),
        "facts.rams",
        "expected a fact that this version knows; found 'rams'",
    ),
    (remove("facts", "os"), "facts.os", "expected a value, but it is missing; found None"),
    (change("facts", "os", " "), "facts.os", "expected text that is not empty; found ' '"),
    (change("facts", "release", 6), "facts.release", "expected text; found 6"),
    (change("facts", "logical_cores", 0), "facts.logical_cores", f"expected {COUNT_1}; found 0"),
    (
        change("facts", "logical_cores", True),
        "facts.logical_cores",
        f"expected {COUNT_1}; found True",
    ),
    (change("facts", "ram_available", -1), "facts.ram_available", f"expected {COUNT}; found -1"),
    (change("facts", "ram_available", 1.5), "facts.ram_available", f"expected {COUNT}; found 1.5"),
    (
        change("facts", "ram_available", 2**63),
        "facts.ram_available",
        f"expected {COUNT}; found {2**63}",
    ),
    (change("facts", "page_size", 4095), "facts.page_size", "expected a power of two; found 4095"),
    (change("facts", "wsl", 3), "facts.wsl", "expected 1, 2 or null; found 3"),
    (change("facts", "wsl", 1.0), "facts.wsl", "expected 1, 2 or null; found 1.0"),
    (change("facts", "wsl", True), "facts.wsl", "expected 1, 2 or null; found True"),
    (
        change("facts", "cpu_quota", float("nan")),
        "facts.cpu_quota",
        "expected a number of cores above 0; found nan",
    ),
    (change("facts", "cpu_quota", "2"), "facts.cpu_quota", "expected a number of cores; found '2'"),
    (
        change("facts", "cpu_quota", 10**400),
        "facts.cpu_quota",
        f"expected a number of cores above 0; found 1{'0' * 56}...",
    ),
    (change("facts", "container", "docker"), "facts.container", "expected a list; found 'docker'"),
    (change("facts", "cpu_flags", ["avx", 2]), "facts.cpu_flags[1]", "expected text; found 2"),
    (change("facts", "kernel_log", 1), "facts.kernel_log", "expected true or false; found 1"),
    (
        change("facts", "adapters", 0, "vendor", "10DE"),
        "facts.adapters[0].vendor",
        f"expected {PCI}; found '10DE'",
    ),
    (
        remove("facts", "adapters", 0, "device"),
        "facts.adapters[0].device",
        "expected a value, but it is missing; found None",
    ),
    (
        change("facts", "adapters", 0, "bus", 1),
        "facts.adapters[0].bus",
        "expected one of vendor, device, address; found 'bus'",
    ),
    (change("facts", "adapters", 0, 7), "facts.adapters[0]", f"expected {ADAPTER}; found 7"),
    (
        change("facts", "huge_pages", "free", None),
        "facts.huge_pages.free",
        f"expected {COUNT}; found None",
    ),
    (
        change("facts", "os", ["x" * 100]),
        "facts.os",
        f"expected text that is not empty; found ['{'x' * 55}...",
    ),
]


@pytest.mark.parametrize(("spoil", "field", "why"), WRONG, ids=[row[1] for row in WRONG])
@pytest.mark.parametrize("nested", [False, True])
def test_a_wrong_field_is_named(make_machine, spoil, field, why, nested):
    machine = make_machine(
        adapters=(Adapter("0x10de", "0x2335"),), huge_pages=HugePages(2 << 20, 1, 1)
    )
    document = copy.deepcopy(machine.to_json())
    spoil(document)
    if nested and field != "format":
        document, field = {"machine": document}, f"machine.{field}"
    with pytest.raises(UsageError) as caught:
        Machine.from_json(document, "facts.json")
    assert caught.value.what == f"facts.json: {field} cannot be used"
    assert caught.value.why == why
    assert "strata doctor --json" in caught.value.remedy


@pytest.mark.parametrize("document", [None, [], "text", 7, {"machine": []}])
def test_a_document_that_is_no_object(document):
    with pytest.raises(UsageError, match=r"^f: (document|machine) cannot be used\nexpected an obj"):
        Machine.from_json(document, "f")


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FACTS)), json_data)
def test_any_value_is_taken_or_refused_with_its_name(name, value):
    document = read_document()
    document["facts"][name] = value
    refusal = ""
    try:
        machine = Machine.from_json(document, "f")
    except UsageError as error:
        refusal = error.what
    if refusal:
        assert refusal.startswith(f"f: facts.{name}")
    else:
        assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


@given(json_data)
def test_any_document_is_refused_with_the_file_named(document):
    with pytest.raises(UsageError, match=r"^facts\.json: "):
        Machine.from_json(document, "facts.json")


def test_memory_is_what_the_cgroup_leaves_of_it(make_machine):
    limited = make_machine(cgroup_memory_limit=16 << 30, cgroup_memory_room=9 << 30)
    assert (limited.memory_installed, limited.memory_available) == (16 << 30, 9 << 30)
    roomy = make_machine(cgroup_memory_limit=1 << 40, cgroup_memory_room=1 << 40)
    for machine in (roomy, make_machine()):
        assert (machine.memory_installed, machine.memory_available) == (64 << 30, 60 << 30)


def read_document():
    return {
        "format": "strata-machine",
        "version": 1,
        "facts": {
            "os": "linux", "release": "", "architecture": "x86_64", "python": "",
            "logical_cores": 2, "physical_cores": 1, "ram_installed": 2, "ram_available": 1,
            "page_size": 4096,
        },
    }  # fmt: skip


# --- observations ------------------------------------------------------------------------------


@pytest.fixture
def live(make_machine):
    return make_machine(replayed=False, observed={})


def test_an_observation_is_asked_once_and_answers_as_json_does(live):
    asked = []

    def ask():
        asked.append(1)
        return {"pair": (1, 2)}

    assert live.observe("k", ask) == live.observe("k", ask) == {"pair": [1, 2]}
    assert len(asked) == 1
    assert live.to_json()["observed"] == {"k": {"pair": [1, 2]}}


def test_a_replayed_machine_never_asks(live):
    live.observe("k", lambda: [1])
    live.observe("none", lambda: None)
    replayed = Machine.from_json(json.loads(json.dumps(live.to_json())))

    def ask():
        raise AssertionError("a replayed machine asked")

    assert replayed.observe("k", ask) == [1]
    assert replayed.observe("none", ask) is None
    assert replayed.observe("unknown", ask) is None
    assert "unknown" not in replayed.observed


def test_what_asking_raises_passes_and_leaves_no_record(live):
    with pytest.raises(ZeroDivisionError):
        live.observe("k", lambda: 1 / 0)
    assert live.observe("k", lambda: 5) == 5


@pytest.mark.parametrize("answer", [{1, 2}, float("inf"), object(), b"bytes"])
def test_an_answer_that_is_not_json_is_refused(live, answer):
    with pytest.raises(PluginError, match="the observation 'k' cannot be recorded"):
        live.observe("k", lambda: answer)
    assert live.observed == {}


def test_two_threads_get_the_same_answer(live):
    barrier = threading.Barrier(2, timeout=120)
    answers = []

    def run(number):
        def ask():
            barrier.wait()
            return number

        answers.append(live.observe("k", ask))

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 2
    assert len(set(answers)) == 1


def test_libraries_modules_and_paths(live, tmp_path):
    missing = str(tmp_path / "libmissing.so")
    assert live.find_library(missing) == ""
    assert live.find_library() == ""
    assert live.has_module("json") is True
    assert live.has_module("a_module_that_nobody_has") is False
    assert live.has_path(str(tmp_path)) is True
    assert live.has_path(missing) is False
    replayed = Machine.from_json(live.to_json())
    assert replayed.find_library(missing) == ""
    assert replayed.find_library(missing, "libother.so") is None
    assert replayed.has_module("json") is True
    assert replayed.has_module("decimal") is None
    assert replayed.has_path(str(tmp_path)) is True
    assert replayed.has_path("/") is None


def test_a_library_that_loads_is_found(live, monkeypatch):
    import ctypes

    def load(name):
        if name != "libsecond.so":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert live.find_library("libfirst.so", "libsecond.so", "libthird.so") == "libsecond.so"
    assert live.observed == {"library:libfirst.so": False, "library:libsecond.so": True}


def test_observing_does_not_change_the_facts(live):
    before = evolve(live)
    live.observe("k", lambda: 1)
    assert live == before
