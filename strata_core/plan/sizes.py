"""What plans are made of: a model's sizes, tiers of memory with their items, and other ways."""

from __future__ import annotations

from attrs import frozen

DENSE = "dense weights"
KV = "keys and values"
WORK = "working memory"
SLOTS = "expert slots"
CHUNK = "prompt chunk"
BROUGHT = "experts of prompts"
EXPERTS = "experts"
RING = "experts on their way"
EMBEDDING = "token embedding"
SMALL = "small buffers"
PROGRAM = "program"
"""Names of items: the same in every plan, in every tier, and beside what was taken."""

BASE_BYTES = 256 << 20
"""What the interpreter and its libraries take besides everything that is counted."""


@frozen(kw_only=True)
class Sizes:
    """Bytes that a model takes with one backend and one KV type.

    `dense` as the backend keeps the dense weights, `experts` all blobs together, `kv_position` one
    position of one sequence, `workspace` the activation buffers of one window and what is held of
    an expert while it is computed. The rest matters to devices alone: `count` of experts in all
    layers, `embedding` of the token table where it is no other role's too (a part of `dense`),
    `small` page-locked buffers, `table` and `moving` those that experts change places through, the
    second of which it can do without, `helper_workspace` of a device that only holds experts,
    `prompt` of a prompt's chunk of `chunk` tokens, and `prompt_buffers` of experts on their way to
    prompts, which are taken where a cache of fewer than `lends` experts has none to lend; `layers`
    with experts, and `token_ops` operations of the products of one token of a prompt.
    """

    dense: int
    experts: int
    kv_position: int
    workspace: int
    count: int = 0
    embedding: int = 0
    small: int = 0
    table: int = 0
    moving: int = 0
    helper_workspace: int = 0
    prompt: int = 0
    prompt_buffers: int = 0
    chunk: int = 0
    lends: int = 0
    layers: int = 0
    token_ops: int = 0

    def blobs(self, count: int) -> int:
        """Bytes of `count` blobs of the mean size."""
        return -(-self.experts * count // self.count) if self.count else 0

    def own_buffers(self, cached: int) -> int:
        """Bytes that prompts take for experts beside a cache of `cached`."""
        return 0 if cached >= min(self.lends, self.count) else self.prompt_buffers

    def fitting(self, nbytes: int) -> int:
        """Blobs of the mean size that fit into `nbytes`, none below zero."""
        return max(0, min(self.count, nbytes * self.count // max(1, self.experts)))


@frozen
class Item:
    """One line of a tier: what takes how many bytes; `name` is one of those above."""

    what: str
    nbytes: int
    name: str = ""


@frozen
class Tier:
    """A kind of memory: what is needed there, and what there is to have.

    `label` is what logs call the device it belongs to; `origin` says where `have` comes from.
    """

    name: str
    items: tuple[Item, ...]
    have: int
    label: str = ""
    origin: str = ""

    @property
    def need(self) -> int:
        """Bytes needed in all."""
        return sum(item.nbytes for item in self.items)

    @property
    def short_by(self) -> int:
        """Bytes missing, 0 where it fits."""
        return max(0, self.need - self.have)


@frozen
class Option:
    """Something else that would fit: the flags to give, and what it then needs."""

    flags: str
    need: int


def gib(nbytes: int) -> str:
    """Bytes in words: GiB from 1 GiB up, else MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
