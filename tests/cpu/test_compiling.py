"""Targets, the cache of object files, and variants that this machine may not be able to run."""

import stat
from pathlib import Path

import numpy as np
import pytest

from strata_core.errors import UsageError
from strata_core.kernels.cpu.jit import Compiler, assembly
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.products import emit_rows
from strata_core.kernels.cpu.target import Target, host_target, usable_variants

GOLDEN = Path(__file__).parents[1] / "arithmetic" / "golden"
LINUX = "x86_64-unknown-linux-gnu"
AVX2 = frozenset({"avx2", "fma", "f16c"})
SERVER = AVX2 | {"avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512vnni"}


@pytest.fixture
def reports():
    return []


def compiled(cache, reports):
    compiler = Compiler(host_target(), cache, reports.append)
    library = Library(compiler)
    assert library.address(Step("merge", (32,)))
    return compiler.compiled


def test_objects_are_kept_and_found_again(tmp_path, reports):
    assert compiled(tmp_path, reports) == 1
    assert compiled(tmp_path, reports) == 0
    assert [p.suffix for p in tmp_path.iterdir()] == [".o"]
    assert reports == []


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 5000])
def test_a_damaged_object_is_compiled_again(tmp_path, reports, damage):
    compiled(tmp_path, reports)
    next(tmp_path.iterdir()).write_bytes(damage)
    assert compiled(tmp_path, reports) == 1
    assert compiled(tmp_path, reports) == 0


def test_a_folder_that_cannot_be_made_is_reported_once(tmp_path, reports):
    blocker = tmp_path / "file"
    blocker.write_text("")
    compiler = Compiler(host_target(), blocker / "cache", reports.append)
    library = Library(compiler)
    for size in (32, 64):
        assert library.address(Step("merge", (size,)))
    assert len(reports) == 1
    assert str(blocker) in reports[0].why
    assert "STRATA_CACHE_DIR" in reports[0].remedy


def test_a_read_only_folder_is_read_but_not_written(tmp_path, reports, monkeypatch):
    compiled(tmp_path, reports)

    def refuse(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("strata_core.kernels.code_cache.tempfile.mkstemp", refuse)
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert compiled(tmp_path, reports) == 0
        assert reports == []
        compiler = Compiler(host_target(), tmp_path, reports.append)
        assert Library(compiler).address(Step("merge", (64,)))
    finally:
        tmp_path.chmod(stat.S_IRWXU)
    assert [r.what for r in reports] == ["compiled kernels are not kept"]


def test_no_cache_at_all(reports):
    assert compiled(None, reports) == 1
    assert reports == []


@pytest.mark.parametrize(
    ("features", "triple", "expected"),
    [
        (SERVER, LINUX, ("vnni", "avx2", "portable")),
        (AVX2 | {"avxvnni"}, LINUX, ("vnni", "avx2", "portable")),
        (AVX2 | {"avx512f", "avx512vnni"}, LINUX, ("avx2", "portable")),
        (AVX2, LINUX, ("avx2", "portable")),
        (AVX2 - {"f16c"}, LINUX, ("portable",)),
        (frozenset(), LINUX, ("portable",)),
        (frozenset({"neon"}), "aarch64-apple-darwin", ("portable",)),
    ],
)
def test_variants_by_features(features, triple, expected):
    assert usable_variants(features, triple) == expected


def test_a_variant_that_cannot_run_is_refused_by_name():
    with pytest.raises(UsageError, match="sse9"):
        host_target("sse9")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "MXFP4"])
@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (Target("vnni", LINUX, "sapphirerapids", SERVER), "vpdpwssd"),
        (Target("vnni", LINUX, "alderlake", AVX2 | {"avxvnni"}), "vpdpwssd"),
        (Target("avx2", LINUX, "haswell", AVX2), "vpmaddwd"),
    ],
    ids=["server", "client", "avx2"],
)
def test_products_use_the_variants_instruction(name, target, wanted):
    module = Compiler(target, None, print).module("rows")
    module.globals[emit_rows(module, target, name)].linkage = "external"
    listing = assembly(module, target)
    assert listing.count(wanted) >= 16
    assert "vfmadd" in listing
    assert "fmaf" not in listing


@pytest.mark.parametrize("name", ["Q4_K", "MXFP4", "F16"])
def test_a_processor_of_2003_gets_the_same_bits(tools, name):
    """x86-64 without any extension: fma is a call of the C library's fmaf."""
    host = host_target()
    if not host.triple.startswith("x86_64"):
        pytest.skip("not an x86-64 machine")
    kernels = tools.kernels(Target("portable", host.triple, "x86-64", frozenset()), None)
    assert not kernels.library.target.has_fma
    g = np.load(GOLDEN / f"{name}.npz")
    x = np.ascontiguousarray(g["x"])
    pack, xs = kernels.quantise(x)
    length = x.shape[1] // 32
    if name == "F16":
        xs, length = tools.addresses(x), x.shape[1]
    out = kernels.linear(name, g["weight"], 11, length, 3, xs)
    number = ~np.isnan(g["out"])
    assert out[number].tobytes() == g["out"][number].tobytes()
    del pack
