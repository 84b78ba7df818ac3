"""The pages on plugins say what is: names, commands, the smallest plugin, output that is shown."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import attrs
import click
import pytest

import strata_core
import strata_core.machine
import strata_core.plugins
from strata_core import abilities, hookspecs, interfaces
from strata_core.cli.main import main, root
from strata_core.machine import Adapter
from strata_core.plugins import PROBE_SECONDS, load_plugins, probe_catalogue
from strata_core.plugins.catalogue import Stage
from strata_core.plugins.records import HOOKS, RESERVED
from strata_core.selection import select_allocator
from strata_core.setting_table import BY_KEY, SETTINGS

REPOSITORY = Path(__file__).parents[2]
PAGES = ("plugins", "hooks", "selection", "interface")
TEXT = "\n".join((REPOSITORY / f"docs/{page}.md").read_text("utf-8") for page in PAGES)
IN_REPOSITORY = pytest.mark.skipif(
    not (REPOSITORY / "plugins").is_dir(),
    reason="a source distribution of core has no plugins folder",
)
ROLES = {
    "backend": interfaces.BackendRecord,
    "allocator": interfaces.AllocatorRecord,
    "source": interfaces.SourceRecord,
}


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    return found


def rows(title: str) -> list[list[str]]:
    """The cells of the section's tables, without headings, back-quotes taken off."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [[cell.replace("`", "") for cell in row] for row in cells if "---" not in row[0]][1:]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_every_block_is_of_a_kind_that_is_checked_here():
    kinds = re.findall(r"^```(\w*)\n.*?^```$", TEXT, re.M | re.S)
    assert set(kinds) == {"sh", "text", "toml", "python"}
    assert kinds.count("text") == len(re.findall(r"<!-- shows: [\w-]+ -->\n```text\n", TEXT))


# --- names -------------------------------------------------------------------------------------


def test_roles_flags_and_built_ins():
    catalogue = load_plugins([])
    shown = {role: (flag, names.split(", ")) for role, flag, _, names in rows("Roles")}
    assert shown == {
        role: (BY_KEY[role].flag, [offer.name for offer in catalogue.offers(role)])
        for role in get_args(interfaces.Role)
    }


SIGNATURE = re.compile(r"^\| `(\w+)(?:\(([^)]*)\))?` \| `(\w+)` \|", re.M)


def test_every_method_and_argument_is_documented():
    listed = {
        (of, name, *re.findall(r"\w+", args))
        for name, args, of in SIGNATURE.findall(section("What build makes"))
    }
    roles = ("Source", "StableSource", "Allocator", "Backend", "Executor")
    protocols = [getattr(interfaces, name) for name in roles]
    protocols += [
        kind
        for kind in vars(abilities).values()
        if getattr(kind, "_is_protocol", False) and kind.__module__ == abilities.__name__
    ]
    there = set()
    for protocol in protocols:
        for name, member in vars(protocol).items():
            if name[0] != "_":
                known = [] if isinstance(member, property) else inspect.signature(member).parameters
                there.add((protocol.__name__, name, *list(known)[1:]))
    assert listed == there


def arguments(annotation: str) -> int | None:
    """How many arguments something of a type takes, None where it is not callable."""
    for node in ast.walk(ast.parse(annotation)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Callable":
            return len(node.slice.elts[0].elts)
    return None


def test_what_a_record_is_asked():
    asked = dict(re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", section("What a record is asked"), re.M))
    fields = {item.name: item.type for kind in ROLES.values() for item in attrs.fields(kind)}
    counts = {name: arguments(kind) for name, kind in fields.items()}
    shown = {name: args.count(",") + 1 for name, args in asked.items()}
    assert shown == {name: count for name, count in counts.items() if count is not None}


def test_what_build_is_given():
    shown = {tuple(row[:2]) for row in rows("What build is given")}
    kinds = {
        "backend": interfaces.BackendContext,
        "allocator": interfaces.AllocatorContext,
        "source": interfaces.SourceContext,
    }
    fields = {role: {item.name for item in attrs.fields(kind)} for role, kind in kinds.items()}
    common = set.intersection(*fields.values())
    own = {(name, role) for role, names in fields.items() for name in names - common}
    assert shown == {(name, "all") for name in common} | own


def test_hooks_take_no_arguments():
    assert "takes no arguments" in section("Hooks")
    assert not any(inspect.signature(getattr(hookspecs, hook)).parameters for hook in HOOKS)


def test_hooks_and_what_they_return():
    assert dict(rows("Hooks")) == {hook: record.__name__ for hook, (_, record) in HOOKS.items()}
    assert all(callable(getattr(hookspecs, hook)) for hook in HOOKS)
    assert f"the group `{hookspecs.PROJECT}`" in section("Hooks")


def test_fields_of_the_records():
    shown = {(name, of) for name, of, _ in rows("Records")}
    fields = {role: {item.name for item in attrs.fields(kind)} for role, kind in ROLES.items()}
    common = set.intersection(*fields.values())
    own = {(name, role) for role, names in fields.items() for name in names - common}
    assert shown == {(name, "all") for name in common} | own
    assert list(RESERVED) == ["auto"]
    assert f"get {PROBE_SECONDS:g} seconds" in section("Records")


def test_what_a_machine_can_be_asked():
    for name in re.findall(r"`machine\.(\w+)", TEXT):
        assert callable(getattr(strata_core.machine.Machine, name))


def test_stages():
    assert [stage for stage, _ in rows("Loading and quarantine")] == list(get_args(Stage))


def test_the_interface_version():
    assert f"`strata_core.interfaces.API` is `{interfaces.API}`" in section("Interface versions")


def test_flags_variables_and_keys():
    known = {"--help"} | {
        setting.flag for setting in SETTINGS if setting.flag and not setting.pending
    }
    for name in root.list_commands(click.Context(root)):
        command = root.get_command(click.Context(root), name)
        known |= {option for param in command.params for option in param.opts}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert shown >= {"--backend", "--machine", "--json"}
    assert shown <= known
    variables = {setting.env for setting in SETTINGS if not setting.pending}
    assert set(re.findall(r"STRATA_\w+", TEXT)) <= variables
    assert BY_KEY["block_plugins"].env == "STRATA_BLOCK_PLUGINS"


# --- commands ----------------------------------------------------------------------------------

COMMANDS = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]


@IN_REPOSITORY
@pytest.mark.parametrize(
    "command", [words for words in COMMANDS if words[0] == "pip"], ids=shlex.join
)
def test_what_pip_installs_is_there(command):
    assert command[:3] == ["pip", "install", "."]
    for word in command[3:]:
        folder, _, extra = word.partition("[")
        project = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text("utf-8"))
        assert project["project"]["entry-points"]["strata"]
        if extra:
            assert extra.rstrip("]") in project["project"]["optional-dependencies"]


def test_every_command_is_pip_or_strata():
    programs = {next(word for word in words if "=" not in word) for words in COMMANDS}
    assert programs == {"pip", "strata"}


# --- output ------------------------------------------------------------------------------------


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """distribution(folder): the entry points of a project's folder, its packages importable."""

    def install(folder: Path) -> list[metadata.EntryPoint]:
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        described = f"Name: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{described}", "utf-8")
        entries = [f"{key} = {value}" for key, value in project["entry-points"]["strata"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[strata]", *entries]), "utf-8")
        monkeypatch.syspath_prepend(str(folder))
        return list(metadata.PathDistribution(info).entry_points)

    monkeypatch.delitem(sys.modules, "strata_populated", raising=False)
    yield install
    sys.modules.pop("strata_populated", None)


@pytest.fixture
def strata(monkeypatch, tmp_path, make_machine, capsys):
    """strata(entry points, facts, arguments): the command where these plugins are all there are."""
    for setting in SETTINGS:
        if setting.env:
            monkeypatch.delenv(setting.env, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))

    def call(entry_points, facts, *args):
        load, machine = load_plugins, make_machine(**facts)
        monkeypatch.setattr(
            strata_core.plugins, "load_plugins", lambda blocked=(): load(entry_points, blocked)
        )
        monkeypatch.setattr(strata_core.machine, "read_machine", lambda: machine)
        code = main(args)
        return code, capsys.readouterr().out

    return call


def shown(name: str) -> str:
    (text,) = re.findall(rf"<!-- shows: {name} -->\n```text\n(.*?)```", TEXT, re.S)
    return text


def end(out: str) -> str:
    """What follows the three tables."""
    return out.split("`strata plan MODEL` says which\n\n")[1]


CARD = {
    "adapters": (Adapter("0x10de", "0x2684", "0000:01:00.0"),),
    "observed": {
        "library:libcuda.so.1": True,
        "cuda:driver": {
            "code": 0,
            "call": "",
            "error": "",
            "version": 12080,
            "devices": [{"name": "A card", "capability": [8, 9], "memory": 24 << 30}],
        },
        "module:cupy": False,
        "module:llvmlite": True,
    },
}


@IN_REPOSITORY
def test_a_card_without_its_library(distribution, strata):
    found = [
        *distribution(REPOSITORY / "plugins/cuda"),
        *distribution(REPOSITORY / "plugins/wsl"),
    ]
    assert strata(found, CARD, "plugins") == (0, shown("card"))


def write_project(folder: Path, name: str, module: str, source: str) -> Path:
    folder.mkdir()
    lines = f'[project]\nname = "{name}"\nversion = "0.3"\n[project.entry-points.strata]\n'
    (folder / "pyproject.toml").write_text(f'{lines}torn = "{module}"\n', "utf-8")
    (folder / f"{module}.py").write_text(source, "utf-8")
    return folder


def test_a_plugin_that_does_not_import(distribution, strata, tmp_path, monkeypatch):
    project = write_project(tmp_path / "a", "strata-torn", "strata_torn", "import missing_library")
    found = distribution(project)
    code, out = strata(found, {}, "plugins")
    assert (code, end(out)) == (2, shown("torn"))
    assert strata(found, {}, "plugins", "--backend", "cpu")[0] == 0
    monkeypatch.setenv("STRATA_BLOCK_PLUGINS", "torn")
    code, out = strata(found, {}, "plugins")
    assert (code, end(out)) == (0, "blocked: torn (strata-torn: torn)\n")


def test_a_mistyped_name(strata):
    code, out = strata([], {}, "plugins", "--backend", "refrence")
    assert (code, end(out)) == (2, shown("typing-error"))


def test_the_members_of_the_json_document(strata):
    code, out = strata([], {}, "plugins", "--json")
    (listed,) = re.findall(r"as one document: (.*?) with stack", TEXT.replace("\n", " "))
    named = {*re.findall(r"`(\w+)`", listed), "blocked"}
    assert code == 0
    assert named <= json.loads(out).keys()
    assert {"api", "backends", "allocators", "sources", "selections", "broken"} <= named


# --- the smallest plugin -----------------------------------------------------------------------


@pytest.fixture
def smallest(tmp_path, distribution) -> list[metadata.EntryPoint]:
    (toml,) = blocks("toml")
    (source,) = blocks("python")
    folder = tmp_path / "smallest"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(toml, "utf-8")
    (folder / "strata_populated.py").write_text(source, "utf-8")
    return distribution(folder)


def test_the_smallest_plugin_is_listed_and_chosen(smallest, strata):
    code, out = strata(smallest, {}, "plugins")
    assert (code, out.split("\n\n")[1] + "\n") == (0, shown("smallest"))


def test_without_supersedes_it_is_one_of_several(smallest, make_machine):
    catalogue = load_plugins(smallest)
    offers = [
        attrs.evolve(offer, record=attrs.evolve(offer.record, supersedes=()))
        for offer in catalogue.allocators
    ]
    probes = probe_catalogue(catalogue, make_machine())["allocator"]
    refused = select_allocator(offers, (), probes, "cpu")
    assert refused.what == "several allocators can be used: host, populated"
    assert refused.remedy == "choose with --allocator host or --allocator populated"


def test_its_distribution_fits_this_core(smallest):
    project = tomllib.loads(blocks("toml")[0])
    core = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert core["version"] == strata_core.__version__
    assert project["project"]["dependencies"] == ["strata-core>=0.1,<0.2"]
    assert strata_core.__version__.startswith("0.1.")
    only = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert only == ["strata_populated.py"]


def test_the_smallest_plugin_gives_memory(smallest):
    import numpy as np

    record = load_plugins(smallest).allocator("populated").record
    allocator = record.build(None)
    assert isinstance(allocator, interfaces.Allocator)
    region = allocator.reserve(3 * 4096 + 5, [], "a test")
    assert region.address % 4096 == 0
    assert [span.nbytes for span in region.spans] == [region.nbytes] == [3 * 4096 + 5]
    view = np.frombuffer((ctypes.c_char * region.nbytes).from_address(region.address), np.uint8)
    assert not view.any()
    allocator.release(region)
    with pytest.raises(
        strata_core.errors.PluginError, match=r"for a test\n.*\nuse --allocator host"
    ):
        allocator.reserve(1 << 62, [], "a test")
    allocator.reserve(1, [], "the end")
    allocator.close()
    allocator.close()


def test_the_smallest_plugin_runs_a_model(smallest, monkeypatch):
    from strata_core.engine import prepare

    load = load_plugins
    monkeypatch.setattr(prepare, "load_plugins", lambda blocked=(): load(smallest, blocked))
    with strata_core.load("demo", allocator="populated", source="arena") as model:
        chosen = {item.role: item.name for item in model.selections}
        logits = model.logits([1, 2, 3])
    assert chosen["allocator"] == "populated"
    with strata_core.load("demo", allocator="host", source="arena") as model:
        assert (model.logits([1, 2, 3]) == logits).all()


@pytest.mark.plugin
@pytest.mark.skipif(find_spec("pip") is None, reason="pip is not in this environment")
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_smallest_plugin_installs_and_its_commands_run(tmp_path):
    (folder := tmp_path / "project").mkdir()
    (folder / "pyproject.toml").write_text(blocks("toml")[0], "utf-8")
    (folder / "strata_populated.py").write_text(blocks("python")[0], "utf-8")
    target = tmp_path / "target"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    path = os.pathsep.join([str(target), str(REPOSITORY)])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}

    def run(*args: object) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, args)],
            env={**plain, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pip", "install", "-q", *options, "--target", target, folder)
    (pip, *commands) = [
        shlex.split(line)
        for line in re.findall(r"```sh\n(.*?)```", section("The smallest plugin"), re.S)[
            0
        ].splitlines()
    ]
    assert pip == ["pip", "install", "."]
    assert [words[:2] for words in commands] == [["strata", "plugins"], ["strata", "generate"]]
    listed, text = (run("strata_core", *words[1:]) for words in commands)
    assert "  populated, because: usable here, and it supersedes host\n" in listed
    assert len(text.split()) > 5
