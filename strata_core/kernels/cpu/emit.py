"""Writing LLVM IR the way one writes arithmetic: values with operators, loops as `with` blocks.

Addresses are 64-bit integers throughout; `Emit.load` and `Emit.store` take one and a type. Float
operations are plain LLVM ones without fast-math flags, so each rounds once and none is contracted;
`fma` is the only fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from llvmlite import ir

I1, I8, I16, I32, I64, I128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()
POINTER = ir.PointerType()


def vec(element: ir.Type, count: int) -> ir.VectorType:
    """The vector type of `count` elements."""
    return ir.VectorType(element, count)


I32X8, F32X8, I16X16 = vec(I32, 8), vec(F32, 8), vec(I16, 16)


def _element(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _is_float(kind: ir.Type) -> bool:
    return isinstance(_element(kind), ir.HalfType | ir.FloatType | ir.DoubleType)


def constant(kind: ir.Type, value: Any) -> ir.Constant:
    """`value` as a constant of `kind`; a single number fills every element of a vector."""
    if isinstance(kind, ir.VectorType):
        values = value if isinstance(value, Sequence) else [value] * kind.count
        return ir.Constant(kind, [ir.Constant(kind.element, v) for v in values])
    return ir.Constant(kind, value)


@frozen(eq=False)
class V:
    """A value under construction; the other operand of an operator may be a Python number."""

    e: Emit
    raw: ir.Value

    @property
    def type(self) -> ir.Type:
        """Its LLVM type."""
        return self.raw.type

    def _binary(self, other: V | float, for_int: str, for_float: str | None = None) -> V:
        name = for_float if _is_float(self.type) else for_int
        if name is None:
            raise TypeError(f"{for_int} does not take {self.type}")
        right = other.raw if isinstance(other, V) else constant(self.type, other)
        return V(self.e, getattr(self.e.b, name)(self.raw, right))

    def __add__(self, other: V | float) -> V:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: V | float) -> V:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: V | float) -> V:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: V | float) -> V:
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: V | int) -> V:
        """Of unsigned integers."""
        return self._binary(other, "udiv")

    def __mod__(self, other: V | int) -> V:
        return self._binary(other, "urem")

    def __and__(self, other: V | int) -> V:
        return self._binary(other, "and_")

    def __or__(self, other: V | int) -> V:
        return self._binary(other, "or_")

    def __xor__(self, other: V | int) -> V:
        return self._binary(other, "xor")

    def __lshift__(self, other: V | int) -> V:
        return self._binary(other, "shl")

    def __rshift__(self, other: V | int) -> V:
        """Logical shift; `sar` is the arithmetic one."""
        return self._binary(other, "lshr")

    def sar(self, other: V | int) -> V:
        """Arithmetic shift right."""
        return self._binary(other, "ashr")

    def __neg__(self) -> V:
        return V(self.e, (self.e.b.fneg if _is_float(self.type) else self.e.b.neg)(self.raw))

    def compare(self, operator: str, other: V | float) -> V:
        """`<`, `<=`, `==`, `!=`, `>=`, `>`: signed, or ordered for floats (a NaN is False)."""
        right = other.raw if isinstance(other, V) else constant(self.type, other)
        make = self.e.b.fcmp_ordered if _is_float(self.type) else self.e.b.icmp_signed
        return V(self.e, make(operator, self.raw, right))

    def __lt__(self, other: V | float) -> V:
        return self.compare("<", other)

    def __le__(self, other: V | float) -> V:
        return self.compare("<=", other)

    def __gt__(self, other: V | float) -> V:
        return self.compare(">", other)

    def __ge__(self, other: V | float) -> V:
        return self.compare(">=", other)

    def zext(self, kind: ir.Type) -> V:
        """Zero-extend."""
        return V(self.e, self.e.b.zext(self.raw, kind))

    def sext(self, kind: ir.Type) -> V:
        """Sign-extend."""
        return V(self.e, self.e.b.sext(self.raw, kind))

    def trunc(self, kind: ir.Type) -> V:
        """Keep the low bits."""
        return V(self.e, self.e.b.trunc(self.raw, kind))

    def bits(self, kind: ir.Type) -> V:
        """The same bits as another type."""
        return V(self.e, self.e.b.bitcast(self.raw, kind))

    def to_float(self, kind: ir.Type = F32X8) -> V:
        """A signed integer as float, to nearest even."""
        return V(self.e, self.e.b.sitofp(self.raw, kind))

    def to_int(self, kind: ir.Type = I32X8) -> V:
        """A float that is a whole number as a signed integer."""
        return V(self.e, self.e.b.fptosi(self.raw, kind))

    def widen(self, kind: ir.Type) -> V:
        """A float as a wider one, exactly."""
        return V(self.e, self.e.b.fpext(self.raw, kind))

    def narrow(self, kind: ir.Type) -> V:
        """A float as a narrower one, to nearest even."""
        return V(self.e, self.e.b.fptrunc(self.raw, kind))

    def __getitem__(self, index: V | int) -> V:
        """One element of a vector."""
        at = index.raw if isinstance(index, V) else ir.Constant(I32, index)
        return V(self.e, self.e.b.extract_element(self.raw, at))

    def shuffle(self, other: V | None, lanes: Sequence[int]) -> V:
        """Elements of self followed by `other`, by number."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.raw
        mask = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return V(self.e, self.e.b.shuffle_vector(self.raw, second, mask))


@frozen(eq=False)
class Var:
    """A variable: a stack cell that the optimiser turns into a register."""

    e: Emit
    cell: ir.Value
    kind: ir.Type

    def get(self) -> V:
        """Its value now."""
        return V(self.e, self.e.b.load(self.cell, typ=self.kind))

    def set(self, value: V | float) -> None:
        """Assign."""
        self.e.b.store(value.raw if isinstance(value, V) else constant(self.kind, value), self.cell)


class Emit:
    """One function under construction; `args` are its arguments."""

    def __init__(self, module: ir.Module, function: ir.Function) -> None:
        self.module = module
        self.function = function
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.args = [V(self, a) for a in function.args]

    # values

    def const(self, kind: ir.Type, value: Any) -> V:
        """A constant; one number fills a vector."""
        return V(self, constant(kind, value))

    def i64(self, value: int) -> V:
        """A 64-bit constant."""
        return self.const(I64, value)

    def splat(self, value: V, count: int = 8) -> V:
        """A vector of `count` times a scalar."""
        kind = vec(value.type, count)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value.raw, ir.Constant(I32, 0))
        return V(self, one).shuffle(None, [0] * count)

    def vector(self, values: Sequence[V]) -> V:
        """Scalars put together."""
        raw: ir.Value = ir.Constant(vec(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            raw = self.b.insert_element(raw, value.raw, ir.Constant(I32, i))
        return V(self, raw)

    def select(self, condition: V, yes: V, no: V) -> V:
        """`yes` where the condition holds, else `no`."""
        return V(self, self.b.select(condition.raw, yes.raw, no.raw))

    def var(self, kind: ir.Type, start: V | float) -> Var:
        """A variable with its first value."""
        with self.b.goto_entry_block():
            cell = self.b.alloca(kind)
        made = Var(self, cell, kind)
        made.set(start)
        return made

    def scratch(self, nbytes: int, align: int = 64) -> V:
        """Address of `nbytes` on the stack, for the whole call."""
        with self.b.goto_entry_block():
            cell = self.b.alloca(ir.ArrayType(I8, nbytes))
            cell.align = align
            address = self.b.ptrtoint(cell, I64)
        return V(self, address)

    # memory

    def load(self, kind: ir.Type, address: V, offset: int = 0, align: int = 1) -> V:
        """What lies `offset` bytes after `address`; unaligned unless said."""
        at = (address + offset) if offset else address
        return V(self, self.b.load(self.b.inttoptr(at.raw, POINTER), typ=kind, align=align))

    def store(self, value: V, address: V, offset: int = 0, align: int = 1) -> None:
        """Store at `offset` bytes after `address`."""
        at = (address + offset) if offset else address
        self.b.store(value.raw, self.b.inttoptr(at.raw, POINTER), align=align)

    def prefetch(self, address: V) -> None:
        """Ask for the cache line of an address that will be read soon; never a fault."""
        fn = self.declare("llvm.prefetch.p0", VOID, [POINTER, I32, I32, I32])
        pointer = self.b.inttoptr(address.raw, POINTER)
        self.b.call(fn, [pointer, *(ir.Constant(I32, n) for n in (0, 3, 1))])

    def copy(self, to: V, source: V, nbytes: V) -> None:
        """Copy bytes that do not overlap."""
        fn = self.declare("llvm.memcpy.p0.p0.i64", VOID, [POINTER, POINTER, I64, I1])
        pointers = [self.b.inttoptr(v.raw, POINTER) for v in (to, source)]
        self.b.call(fn, [*pointers, nbytes.raw, ir.Constant(I1, 0)])

    def clear(self, to: V, nbytes: V) -> None:
        """Set bytes to zero."""
        fn = self.declare("llvm.memset.p0.i64", VOID, [POINTER, I8, I64, I1])
        pointer = self.b.inttoptr(to.raw, POINTER)
        self.b.call(fn, [pointer, ir.Constant(I8, 0), nbytes.raw, ir.Constant(I1, 0)])

    # calls

    def declare(self, name: str, result: ir.Type, args: Sequence[ir.Type]) -> ir.Function:
        """A function of that name in the module, declared at its first mention."""
        have = self.module.globals.get(name)
        return have or ir.Function(self.module, ir.FunctionType(result, args), name)

    def call(self, name: str, result: ir.Type, *args: V) -> V:
        """Call a function or LLVM intrinsic by name."""
        fn = self.declare(name, result, [a.type for a in args])
        return V(self, self.b.call(fn, [a.raw for a in args]))

    def _overloaded(self, name: str, *args: V) -> V:
        kind = args[0].type
        suffix = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        letter = "f" if _is_float(kind) else "i"
        width = 32 if letter == "f" else _element(kind).width
        return self.call(f"llvm.{name}.{suffix}{letter}{width}", kind, *args)

    def fma(self, a: V, b: V, c: V) -> V:
        """`a * b + c`, rounded once."""
        return self._overloaded("fma", a, b, c)

    def rint(self, x: V) -> V:
        """Nearest whole number, ties to even."""
        return self._overloaded("rint", x)

    def sqrt(self, x: V) -> V:
        """IEEE square root."""
        return self._overloaded("sqrt", x)

    def abs(self, x: V) -> V:
        """Absolute value of a float."""
        return self._overloaded("fabs", x)

    def copysign(self, x: V, sign: V) -> V:
        """The magnitude of `x` with the sign of `sign`."""
        return self._overloaded("copysign", x, sign)

    def umax(self, a: V, b: V) -> V:
        """The larger of unsigned integers."""
        return self._overloaded("umax", a, b)

    def smax(self, a: V, b: V) -> V:
        """The larger of signed integers."""
        return self._overloaded("smax", a, b)

    def smin(self, a: V, b: V) -> V:
        """The smaller of signed integers."""
        return self._overloaded("smin", a, b)

    def call_address(self, address: V, kind: ir.FunctionType, *args: V) -> V:
        """Call the function that lies at an address."""
        pointer = self.b.inttoptr(address.raw, kind.as_pointer())
        return V(self, self.b.call(pointer, [a.raw for a in args]))

    def control_word(self, instruction: str, address: V) -> None:
        """x86 only: `stmxcsr` stores the thread's float control word, `ldmxcsr` sets it."""
        fn = self.declare(f"llvm.x86.sse.{instruction}", VOID, [POINTER])
        self.b.call(fn, [self.b.inttoptr(address.raw, POINTER)])

    # words shared between threads

    def load_acquire(self, address: V, order: str = "acquire") -> V:
        """An int64 word; later accesses of this thread come after it.

        With `order` "seq_cst" it also takes its place among all exchanges and `fetch_add`s.
        """
        pointer = self.b.inttoptr(address.raw, POINTER)
        return V(self, self.b.load_atomic(pointer, order, 8, typ=I64))

    def store_release(self, value: V, address: V) -> None:
        """Write an int64 word; who sees it sees what this thread wrote before."""
        pointer = self.b.inttoptr(address.raw, I64.as_pointer())
        self.b.store_atomic(value.raw, pointer, "release", 8)

    def fetch_add(self, address: V, value: V | int) -> V:
        """Add to an int64 word in one total order; the value before."""
        pointer = self.b.inttoptr(address.raw, POINTER)
        addend = value.raw if isinstance(value, V) else ir.Constant(I64, value)
        return V(self, self.b.atomic_rmw("add", pointer, addend, "seq_cst"))

    def exchange(self, address: V, value: int) -> V:
        """Replace an int64 word in one total order; the value before."""
        pointer = self.b.inttoptr(address.raw, POINTER)
        return V(self, self.b.atomic_rmw("xchg", pointer, ir.Constant(I64, value), "seq_cst"))

    # control

    @contextmanager
    def forever(self) -> Iterator[Callable[[V], None]]:
        """A loop that ends where the body calls the given function with a condition that holds."""
        body = self.function.append_basic_block("again")
        after = self.function.append_basic_block("left")
        self.b.branch(body)
        self.b.position_at_end(body)

        def leave_if(condition: V) -> None:
            go_on = self.function.append_basic_block("stay")
            self.b.cbranch(condition.raw, after, go_on)
            self.b.position_at_end(go_on)

        yield leave_if
        self.b.branch(body)
        self.b.position_at_end(after)

    @contextmanager
    def loop(self, start: V | int, stop: V | int, step: int = 1) -> Iterator[V]:
        """For `i` from `start` below `stop` (64-bit, signed); the body is the `with` block."""
        first = start if isinstance(start, V) else self.i64(start)
        end = stop if isinstance(stop, V) else self.i64(stop)
        before = self.b.block
        head = self.function.append_basic_block("loop")
        body = self.function.append_basic_block("body")
        after = self.function.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(first.raw, before)
        self.b.cbranch(self.b.icmp_signed("<", i, end.raw), body, after)
        self.b.position_at_end(body)
        yield V(self, i)
        i.add_incoming(self.b.add(i, ir.Constant(I64, step)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def when(self, condition: V) -> Iterator[None]:
        """The `with` block runs only where the scalar condition holds."""
        with self.b.if_then(condition.raw):
            yield

    def finish(self, value: V | None = None) -> None:
        """Return."""
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value.raw)
