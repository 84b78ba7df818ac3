"""Giving a checkpoint's tensors their roles, with every presence, shape and type checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve, field, frozen

from strata_core.checkpoint.experts import ExpertTable, Stored, blob_layout
from strata_core.checkpoint.hyper import Hyper
from strata_core.checkpoint.roles import (
    EXPERT_ROLES,
    FAMILIES,
    QKV_BIASES,
    ROLES,
    RoleSpec,
    changes_result,
    dense_roles,
    names,
)
from strata_core.checkpoint.shown import printable
from strata_core.checkpoint.tensor import Tensor
from strata_core.errors import CheckpointError
from strata_core.interfaces import BlobLayout

Key = tuple[str, int | None]
_FLOATS = ("F32", "F16", "BF16")


@frozen(eq=False)
class Assigned:
    """Tensors by (role, layer), the experts' table, and the names that no role claims."""

    tensors: Mapping[Key, Tensor]
    experts: ExpertTable
    unclaimed: tuple[str, ...]


def assign_roles(path: Path, form: str, hyper: Hyper, tensors: Mapping[str, Tensor]) -> Assigned:
    """Every role of the model filled from `tensors`. Raises CheckpointError naming the tensor."""
    work = _Assignment(path, form, hyper, tensors)
    dense = work.dense()
    experts = work.experts()
    unclaimed = tuple(name for name in tensors if name not in work.claimed)
    for name in unclaimed:
        if changes_result(name, hyper):
            raise CheckpointError(
                f"{tensors[name].file}: tensor {printable(name)} has no role in {hyper.family}",
                "left out, it would change the result without a word",
                "this variant of the architecture is not supported",
            )
    return Assigned(dense, experts, unclaimed)


@frozen(eq=False)
class _Assignment:
    path: Path
    form: str
    hyper: Hyper
    tensors: Mapping[str, Tensor]
    claimed: set[str] = field(factory=set)

    def dense(self) -> dict[Key, Tensor]:
        wanted = dense_roles(self.hyper, qkv_bias=self._has_bias())
        return {(spec.role, layer): self._one(spec, layer) for spec, layer in wanted}

    def _has_bias(self) -> bool:
        """A bias anywhere makes all of them needed; a family without any claims none."""
        if not FAMILIES[self.hyper.family].qkv_bias:
            return False
        return any(
            name in self.tensors for role in QKV_BIASES for name in names(ROLES[role], self.form, 0)
        )

    def _one(self, spec: RoleSpec, layer: int | None) -> Tensor:
        tensor = self._find(spec, layer)
        expected = spec.shape(self.hyper)
        if tensor.shape != expected and _squeezed(tensor.shape) == _squeezed(expected):
            tensor = evolve(tensor, shape=expected)
        self._check(spec, tensor, expected)
        return tensor

    def _find(self, spec: RoleSpec, layer: int | None, expert: int | None = None) -> Tensor:
        candidates = names(spec, self.form, layer, expert)
        for name in candidates:
            if name in self.tensors:
                self.claimed.add(name)
                return self.tensors[name]
        raise CheckpointError(
            f"{self.path}: tensor {' or '.join(candidates)} is missing",
            f"a {self.hyper.family} model needs it as {spec.role}",
            "the checkpoint is incomplete; download or convert it again",
        )

    def _check(self, spec: RoleSpec, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tensor.shape != expected:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} has the shape {list(tensor.shape)}",
                f"as {spec.role} of this model it must be {list(expected)}",
                "sizes and tensors do not belong together; download or convert the model again",
            )
        if spec.vector and tensor.type.name not in _FLOATS:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} has the type {tensor.type.name}",
                f"{spec.role} must be one of {', '.join(_FLOATS)}",
                "convert the model again",
            )

    def experts(self) -> ExpertTable:
        stored: dict[int, tuple[Stored, Stored, Stored]] = {}
        layouts: dict[int, BlobLayout] = {}
        for layer in self.hyper.moe_layers:
            gate, up, down = (self._expert_part(ROLES[role], layer) for role in EXPERT_ROLES)
            stored[layer] = (gate, up, down)
            layouts[layer] = blob_layout(_first(gate), _first(up), _first(down))
        return ExpertTable(self.hyper.experts, layouts, stored)

    def _expert_part(self, spec: RoleSpec, layer: int) -> Stored:
        one = spec.shape(self.hyper)
        if self.form == "gguf":
            stacked = self._find(spec, layer)
            self._check(spec, stacked, (self.hyper.experts, *one))
            return stacked
        each = tuple(self._find(spec, layer, e) for e in range(self.hyper.experts))
        for tensor in each:
            self._check(spec, tensor, one)
            if tensor.type is not each[0].type:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name} has the type {tensor.type.name}",
                    f"expert 0 of the layer has {each[0].type.name}; all must be of one type",
                    "convert the model again",
                )
        return each


def _first(stored: Stored) -> Tensor:
    return stored.item(0) if isinstance(stored, Tensor) else stored[0]


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape without leading ones: GGUF files drop them, so [1, n] may be stored as [n]."""
    start = 0
    while start < len(shape) - 1 and shape[start] == 1:
        start += 1
    return tuple(shape[start:])
