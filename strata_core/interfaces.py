"""What a plugin author must read: the records that hooks return, and what their `build` makes.

Three roles. A *backend* computes, an *allocator* gives host memory, a *source* supplies experts.
Each role has a record (light, returned by a hook) whose `probe` says whether it can serve this
machine and whose `build` makes the object that does. Records are plain data: nothing here imports
a GPU library, and no hook is called after start. More that parts may offer: `abilities.py`.

The interface's version is `API`: core takes plugins of the same major and a minor up to its own.

Unless a docstring says otherwise: sizes and offsets are bytes, addresses are integers in the host
address space; a method is called from the thread that called `build`, and one that raises has
changed nothing. What `build` is given stays the giver's; what `build` made is closed once by core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    import numpy as np

    from strata_core.errors import Degradation
    from strata_core.kernels.program import Program
    from strata_core.machine import Machine
    from strata_core.runtime import Device

API = (1, 0)
"""(major, minor) of this interface. A new major may break plugins; a new minor only adds."""

Role = Literal["backend", "allocator", "source"]


# --- records -----------------------------------------------------------------------------------
@frozen
class Usable:
    """A probe's yes. `detail` says in a few words what was found, e.g. a driver version."""

    detail: str = ""


@frozen
class Unusable:
    """A probe's no: `reason` is the fact found, `hint` what the user can do about it."""

    reason: str
    hint: str = ""


Probe = Usable | Unusable


@frozen(kw_only=True)
class Capabilities:
    """What a backend can do: weight types (None: every one), KV types (its default first).

    `exact` says that it keeps docs/arithmetic.md, so that tokens do not depend on placement;
    `own_order` that it sums longer prompts in an order of its own (section 11 there). It tells
    `dense_bytes(type, elements)`, memory of dense weights (None: as stored); `expert_bytes(layout)`
    of an expert beside its blob (None: 0); `threads` of the CPU (None: not known, as in a record).
    """

    types: frozenset[str] | None = None
    kv_types: tuple[str, ...] = ("fp32",)
    exact: bool = False
    own_order: bool = False
    dense_bytes: Callable[[str, int], int] | None = None
    expert_bytes: Callable[[BlobLayout], int] | None = None
    threads: int | None = None


@frozen(kw_only=True)
class BackendRecord:
    """One backend on offer.

    `name` is what `--backend` takes; `summary` one line for `strata plugins`; `api` the `API` that
    the plugin was written for. `supersedes` names records that `auto` drops when this one is
    usable; `fallback` marks one that `auto` takes only when nothing else is usable.
    `probe(machine)` answers from the machine's facts in well under a second and opens no device
    context; what it looks up it asks through `machine.observe`, so that it can be replayed.
    `build` may be called once per model. `capabilities` is what it can do anywhere, for planning;
    a built backend may offer less. One that is not `automatic` is used only by name.
    `devices(machine, options)` are those it would use, told without a context (None: it has none).
    """

    name: str
    summary: str
    api: tuple[int, int]
    probe: Callable[[Machine], Probe]
    build: Callable[[BackendContext], Backend]
    supersedes: tuple[str, ...] = ()
    fallback: bool = False
    capabilities: Capabilities = Capabilities()
    automatic: bool = True
    devices: Callable[[Machine, Mapping[str, Any]], Sequence[Device]] | None = None


@frozen(kw_only=True)
class AllocatorRecord:
    """One allocator of host memory on offer; `serves` names the backends it can work for.

    `pins(machine, options)` are the bytes it expects to page-lock, for planning, told without a
    device (None, or no `pins`: not known). The other fields are as in `BackendRecord`.
    """

    name: str
    summary: str
    api: tuple[int, int]
    serves: tuple[str, ...]
    probe: Callable[[Machine], Probe]
    build: Callable[[AllocatorContext], Allocator]
    supersedes: tuple[str, ...] = ()
    fallback: bool = False
    pins: Callable[[Machine, Mapping[str, Any]], int | None] | None = None


@frozen(kw_only=True)
class SourceRecord:
    """One expert source on offer.

    `claims(form)` may return True where this source alone can read the model in hand; a source
    that claims nothing is used only when `--source` names it. `form` is the checkpoint's form:
    "gguf", "hub", "pack", or what a plugin calls its own. Other fields are as in `BackendRecord`.
    """

    name: str
    summary: str
    api: tuple[int, int]
    probe: Callable[[Machine], Probe]
    build: Callable[[SourceContext], Source]
    supersedes: tuple[str, ...] = ()
    fallback: bool = False
    claims: Callable[[str], bool] | None = None


Record = BackendRecord | AllocatorRecord | SourceRecord


# --- what `build` is given ---------------------------------------------------------------------
class Progress(Protocol):
    """Told about long work; thread-safe, cheap, and silent where nobody watches.

    A piece of work begins (`nbytes` will be moved in all), advances by `nbytes`, ends.
    """

    def start(self, label: str, nbytes: int) -> None: ...  # noqa: D102 - told above
    def advance(self, nbytes: int) -> None: ...  # noqa: D102
    def done(self) -> None: ...  # noqa: D102


@frozen(kw_only=True)
class BackendContext:
    """What a backend is built from: the machine, the options by flag name, where to report."""

    machine: Machine
    options: Mapping[str, Any]
    degrade: Callable[[Degradation], None]


@frozen(kw_only=True)
class AllocatorContext(BackendContext):
    """What an allocator is built from; `backend` is the one already built."""

    backend: Backend


@frozen(kw_only=True)
class SourceContext(BackendContext):
    """What a source is built from. `excluded`: on devices; `ranking`: all, most asked for first.
    `budget`: bytes of host memory that experts may be kept in (None: it was not planned).
    """

    experts: ExpertFiles
    allocator: Allocator
    progress: Progress
    excluded: frozenset[Expert] = frozenset()
    ranking: tuple[Expert, ...] | None = None
    budget: int | None = None


# --- experts -----------------------------------------------------------------------------------
@frozen(order=True)
class Expert:
    """One routed expert: (layer, index)."""

    layer: int
    index: int

    def __str__(self) -> str:
        return f"expert {self.index} of layer {self.layer}"


@frozen
class BlobPart:
    """The gate, up or down matrix inside a blob: `rows` rows of `columns` weights of one type.

    `type` is a name of the table in `checkpoint/types.py`; `offset` counts from the blob's start.
    """

    name: Literal["gate", "up", "down"]
    type: str
    rows: int
    columns: int
    offset: int
    nbytes: int


@frozen
class BlobLayout:
    """How the blobs of one layer are laid out; all experts of a layer share it."""

    parts: tuple[BlobPart, BlobPart, BlobPart]
    nbytes: int


@frozen
class Piece:
    """A run of bytes in a file."""

    file: Path
    offset: int
    nbytes: int


class ExpertFiles(Protocol):
    """Where experts lie in the model's files; immutable. A pack's can check blobs: docs/pack.md."""

    @property
    def layouts(self) -> Mapping[int, BlobLayout]:
        """Blob layout by layer, for the layers that have routed experts."""

    @property
    def count(self) -> int:
        """Number of routed experts in each of those layers."""

    def pieces(self, expert: Expert) -> tuple[Piece, Piece, Piece]:
        """The file ranges of the expert's gate, up and down, in that order."""

    def mapped(self, expert: Expert) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read-only uint8 views of the same three ranges in the mapped file; nothing is copied."""


@frozen
class View:
    """Where an expert can be reached, and four independent facts about it.

    `parts` are the host addresses of gate, up and down; in a blob that lies in one piece they
    follow its layout. `in_ram`: its bytes are in memory now. `dma`: a copy engine may read them; a
    blob in one piece lies in one page-locked piece. `alias`: device address of `parts[0]` where the
    device has one (the other parts lie at the same distances). `stable`: all hold until `release`.
    """

    parts: tuple[int, int, int]
    in_ram: bool
    dma: bool = False
    alias: int | None = None
    stable: bool = True


@runtime_checkable
class Source(Protocol):
    """Supplies blobs from host memory or a file.

    One thread, the engine's, calls everything but `read_into`, which any thread may call at any
    time between `build` and `close`. After a failed call the source is as it was before it.
    """

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """The engine is about to ask for these experts of `layer`; a source may read ahead."""

    def view(self, expert: Expert) -> View:
        """Acquire an expert; its addresses hold until `release`. Raises StrataError."""

    def read_into(self, expert: Expert, buffer: memoryview) -> int:
        """Write the whole blob into `buffer` and return `pad`: the blob starts `pad` bytes in.

        `buffer` is writable and at least the blob's size rounded up to 4 KiB plus 4 KiB.
        """

    def release(self, expert: Expert) -> None:
        """Give back what `view` acquired, once per call."""

    def close(self) -> None:
        """Free everything; no view may be used afterwards. Calling it again does nothing."""


@runtime_checkable
class StableSource(Source, Protocol):
    """A source whose experts all have addresses that hold until `close`.

    A backend may read such experts at any time, in any thread, without acquiring them.
    """

    def addresses(self, layer: int) -> np.ndarray:
        """uint64 [experts, 3]: addresses of gate, up and down of each expert of `layer`."""


# --- host memory -------------------------------------------------------------------------------
@frozen
class Span:
    """A piece of host memory that is one registration, with one device alias (None: none)."""

    address: int
    nbytes: int
    alias: int | None = None
    pinned: bool = False


@frozen
class Region:
    """Host memory handed out by an allocator: spans in ascending order, without holes.

    `path` names how it was had ("pageable", "pinned", ...), `reason` why that one.
    """

    address: int
    nbytes: int
    spans: tuple[Span, ...]
    path: str
    reason: str
    purpose: str


@frozen
class StartPolicy:
    """The wishes an allocator has for the order and the places of a start.

    `contexts_first`: open every device's context before anything else is placed.
    `small_pins_first`: take small pinned buffers before bulk pinning. `pin_limit`: most bytes to
    pin, None when unknown. `embedding`: where the token embedding goes.
    """

    contexts_first: bool = False
    small_pins_first: bool = True
    pin_limit: int | None = None
    embedding: Literal["device", "pinned"] = "device"


@runtime_checkable
class Allocator(Protocol):
    """Gives host memory. Any thread may call it; what it gave stays owned by it.

    If it has `contexts_ready(devices)`, it is told when those are open and nothing is pinned yet.
    """

    @property
    def start_policy(self) -> StartPolicy:
        """Read once, before anything is placed."""

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        """Host memory of `nbytes`, page-aligned.

        Spans end at offsets in `cuts`, moved up to a page, or where a limit or a refusal ends them.
        Raises StrataError, holding nothing, where not even pageable memory can be had.
        """

    def release(self, region: Region) -> None:
        """Give a region back; its addresses are invalid afterwards."""

    def close(self) -> None:
        """Release whatever is left. Calling it again does nothing."""


# --- computing ---------------------------------------------------------------------------------
@frozen
class Limits:
    """Sizes that a bound program is made for: tokens in one window, logits rows, context length."""

    tokens: int
    logits: int
    context: int
    kv_type: str


@frozen(eq=False)
class Window:
    """The input of one run of a program: T tokens of one or several sequences.

    `ids`, `positions`, `slots` are int32 [T]: token, absolute position in its sequence, and the
    executor's sequence slot; the tokens of one sequence stand together, positions ascending.
    `logits_rows` int32 [R] are the rows whose logits are wanted. `kernel_class` chooses window or
    prompt kernels for the whole window; it depends on the request alone.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    logits_rows: np.ndarray
    kernel_class: Literal["window", "prompt"]


class Executor(Protocol):
    """A program bound to its weights, source and buffers. One thread; any asks `counters`."""

    def open_sequence(self) -> int:
        """A slot with room for `Limits.context` positions of state. Raises StrataError."""

    def close_sequence(self, slot: int) -> None:
        """Free a slot."""

    def save(self, slot: int, length: int) -> object:
        """A snapshot of the state after `length` positions; cheap where state is KV alone."""

    def restore(self, slot: int, snapshot: object) -> None:
        """Go back to a snapshot; positions after it are forgotten."""

    def run(self, window: Window) -> np.ndarray:
        """Compute one window; float32 logits [R, vocabulary], valid until the next run or `close`.

        After an error its sequences hold no valid state: close them or restore a snapshot.
        """

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Experts and bytes served so far by lane: {"hit": {"experts": n, "bytes": n}, ...}."""

    def close(self) -> None:
        """Free all buffers and slots."""


class Weights(Protocol):
    """The dense weights by role, as `bind` reads them; immutable, any thread may ask."""

    def raw(self, role: str, layer: int | None) -> tuple[str, tuple[int, ...], np.ndarray]:
        """(type name, shape, uint8 bytes as stored; a view of the mapped file, not a copy)."""


@runtime_checkable
class Backend(Protocol):
    """A runtime and its kernels: turns a program into what runs. One thread calls it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do on this machine; fixed after `build`, but `bind` may clear `exact`."""

    def bind(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        progress: Progress,
    ) -> Executor:
        """Make the program runnable. Raises StrataError, and then holds nothing of it."""

    def close(self) -> None:
        """Free the runtime; its executors were closed before. Again: nothing happens."""
