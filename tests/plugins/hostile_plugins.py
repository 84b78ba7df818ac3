"""Source text of plugins that misbehave in one way each, for `test_hostile.py`."""

from __future__ import annotations

from strata_core.plugins import PROBE_SECONDS

SOUND = """
import os, sys, time

from attrs import evolve

from strata_core import builtin
from strata_core.hookspecs import hookimpl
from strata_core.interfaces import Usable
from strata_core.kernels.reference_backend import ReferenceBackend
from strata_core.memory.host import HostAllocator
from strata_core.sources.arena import Arena


def like(records, taken, **changes):
    return evolve(next(item for item in records if item.name == taken), **changes)


def at_import():
    pass

def at_probe(machine):
    return Usable("")

def source(context):
    return Arena(context.experts, context.allocator, context.progress)

def allocator(context):
    return HostAllocator()

def backend(context):
    return ReferenceBackend()

def claims(form):
    return False

def never(machine, options):
    return None

class Refuses:
    \"\"\"Raises at every attribute but those of every object.\"\"\"

    def __getattr__(self, name):
        def fails(*args, **named):
            raise RuntimeError(f"{name} fails")
        return fails

    @property
    def capabilities(self):
        raise RuntimeError("capabilities fails")

    @property
    def start_policy(self):
        raise RuntimeError("start_policy fails")

"""

HOOKS = """

@hookimpl
def strata_expert_sources():
    return [like(builtin.strata_expert_sources(), "arena", name="NAME", probe=at_probe,
                 build=source, claims=claims)]

@hookimpl
def strata_allocators():
    return [like(builtin.strata_allocators(), "host", name="NAME", probe=at_probe,
                 build=allocator, serves=("reference", "cpu", "NAME"), fallback=True)]

@hookimpl
def strata_backends():
    return [like(builtin.strata_backends(), "reference", name="NAME", probe=at_probe,
                 build=backend, automatic=False)]
"""

EVERYWHERE = """
def trouble():
    DEED

class Source(Arena):
    def begin_layer(self, layer, experts):
        trouble()
        return super().begin_layer(layer, experts)
    def view(self, expert):
        trouble()
        return super().view(expert)
    def close(self):
        trouble()
        return super().close()

def at_probe(machine):
    trouble()
    return Usable("")

def source(context):
    trouble()
    return Source(context.experts, context.allocator, context.progress)

trouble()
"""


def plugin(name: str, change: str = "", hooks: str = HOOKS) -> str:
    """A module that is sound but for `change`, which may define anything anew."""
    return SOUND + change + hooks.replace("NAME", name)


HOSTILE: dict[str, str] = {
    "import-error": plugin("import-error", "import a_library_that_nobody_has"),
    "sys-exit": plugin("sys-exit", "sys.exit(3)"),
    "slow-import": plugin("slow-import", "time.sleep(1)"),
    "monkeypatches": plugin(
        "monkeypatches",
        "import builtins, json, strata_core.selection\n"
        "builtins.sorted = json.dumps = strata_core.selection.select_backend = None",
    ),
    "raises-in-hook": plugin(
        "raises-in-hook", hooks="\n@hookimpl\ndef strata_expert_sources():\n    sys.exit('no')\n"
    ),
    "wrong-records": plugin(
        "wrong-records",
        hooks="\n@hookimpl\ndef strata_expert_sources():\n    return ['arena', 7]\n",
    ),
    "wrong-fields": plugin(
        "wrong-fields",
        hooks=HOOKS.replace("fallback=True", "supersedes='host'"),
    ),
    "hang-in-probe": plugin(
        "hang-in-probe", "def at_probe(machine):\n    time.sleep(3600)\n    return Usable('')\n"
    ),
    "raises-in-probe": plugin("raises-in-probe", "def at_probe(machine):\n    sys.exit(4)\n"),
    "wrong-probe": plugin("wrong-probe", "def at_probe(machine):\n    return 'yes'\n"),
    "raises-when-asked": plugin(
        "raises-when-asked",
        "def never(machine, options):\n    raise RuntimeError('planning fails')\n"
        "def claims(form):\n    raise RuntimeError('claims fails')\n",
        HOOKS.replace("automatic=False", "automatic=False, devices=never"),
    ),
    "wrong-built": plugin(
        "wrong-built",
        "def source(context):\n    return 7\n"
        "def allocator(context):\n    return None\n"
        "def backend(context):\n    return 'a backend'\n",
    ),
    "raises-in-build": plugin(
        "raises-in-build",
        "def source(context):\n    raise RuntimeError('build fails')\n"
        "def allocator(context):\n    sys.exit(5)\n"
        "def backend(context):\n    raise RuntimeError('build fails')\n",
    ),
    "raises-everywhere": plugin(
        "raises-everywhere",
        "def source(context):\n    return Refuses()\n"
        "def allocator(context):\n    return Refuses()\n"
        "def backend(context):\n    return Refuses()\n",
    ),
    "wrong-answers": plugin(
        "wrong-answers",
        "class Source(Arena):\n"
        "    def view(self, expert):\n        return 'here'\n"
        "    def addresses(self, layer):\n        return 'there'\n"
        "class Allocator(HostAllocator):\n"
        "    def reserve(self, nbytes, cuts, purpose):\n        return 4096\n"
        "class Backend(ReferenceBackend):\n"
        "    def bind(self, *args):\n        return self\n"
        "def source(context):\n"
        "    return Source(context.experts, context.allocator, context.progress)\n"
        "def allocator(context):\n    return Allocator()\n"
        "def backend(context):\n    return Backend()\n",
    ),
    "prints": plugin("prints", EVERYWHERE.replace("DEED", "print('noise')")),
    "changes-folder": plugin("changes-folder", EVERYWHERE.replace("DEED", "os.chdir('/')")),
}
"""By the name of the records that the plugin offers in all three roles."""

NOT_LOADED = {
    "import-error": "import",
    "sys-exit": "import",
    "monkeypatches": "changes",
    "raises-in-hook": "call",
    "wrong-records": "records",
    "wrong-fields": "records",
}
"""Those of which nothing is offered, with the stage that they fail at."""

UNUSABLE = {
    "hang-in-probe": f"its probe gave no answer within {PROBE_SECONDS:g} s",
    "raises-in-probe": "its probe raised SystemExit: 4",
    "wrong-probe": "its probe returned str, not Usable or Unusable",
}
"""Those whose probe cannot be relied on, with the reason that is shown."""

HARMLESS = ("slow-import", "prints", "changes-folder")
"""Those that do their work all the same."""
