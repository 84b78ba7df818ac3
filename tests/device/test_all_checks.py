"""Every check of a device in one call: what of it is skipped, and what the summary says."""

from __future__ import annotations

import sys
from argparse import Namespace

import all_checks
import pytest
import reference_models

HUB = ("config.json", "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A folder with one model of each kind, as the others have not travelled."""
    files = (
        "kjv-moe/kjv-Q4_0.gguf",
        "kjv-moe/reference.npz",
        *(f"tiny/qwen3_moe/{n}" for n in HUB),
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(folder):
    asked = Namespace(models=folder, backend="cuda", matrix=False)
    return {check.name: check for check in all_checks.checks(asked)}


def test_a_check_of_a_model_that_is_not_there_is_skipped(folder):
    skipped = {name: check.missing for name, check in found(folder).items() if check.missing}
    for tool in ("memcheck", "racecheck", "hip"):
        skipped.pop(tool, None)  # not installed here, as the reason says
    assert skipped == {
        "identity kjv-Q4_K_M.gguf": "kjv-moe/kjv-Q4_K_M.gguf is not there",
        "identity kjv-Q8_0.gguf": "kjv-moe/kjv-Q8_0.gguf is not there",
        "identity kjv-MXFP4.gguf": "kjv-moe/kjv-MXFP4.gguf is not there",
        "identity kjv-moe": f"{folder.name}/kjv-moe is not there",
        **{f"identity {n}": f"tiny/{n} is not there" for n in ("qwen2_moe", "olmoe", "mixtral")},
    }


def test_no_command_names_a_model_that_is_not_there(folder):
    everything = [*reference_models.kjv(folder), *reference_models.tiny(folder)]
    gone = {str(model) for model in everything if reference_models.missing(model)}
    checks = [check for check in found(folder).values() if not check.missing]
    assert not any(gone & {*check.command} for check in checks)
    closeness = found(folder)["closeness"]
    assert str(folder / "kjv-moe/kjv-Q4_0.gguf") in closeness.command
    assert closeness.left_out == (
        "left out, not there: kjv-Q4_K_M.gguf, kjv-Q8_0.gguf, kjv-MXFP4.gguf, kjv-moe"
    )


def test_without_the_models_nothing_that_needs_one_runs(tmp_path):
    left = {check.name for check in found(tmp_path).values() if not check.missing}
    assert left == {"verbs", "kernels", "golden", "memory"}


def test_a_folder_in_parts_is_not_there(folder):
    hub = folder / "kjv-moe"
    (hub / "config.json").touch()
    assert reference_models.missing(hub).endswith("kjv-moe lacks model.safetensors")
    (hub / reference_models.INDEX).write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    (hub / "model-1.safetensors").touch()
    assert reference_models.missing(hub).endswith("kjv-moe lacks model-2.safetensors")
    (hub / "model-2.safetensors").touch()
    assert reference_models.missing(hub) == ""


@pytest.mark.parametrize(("only", "code"), [(["helper", "failures"], 1), (["helper", "tried"], 0)])
def test_the_summary_counts_what_was_skipped(folder, monkeypatch, capsys, only, code):
    (folder / "kjv-moe/kjv-Q4_0.gguf").unlink()
    tried = all_checks.Check(
        name="tried",
        command=(sys.executable, "-c", "print('3 of 3 ways equal')"),
        left_out="left out, not there: a",
    )
    real = all_checks.checks
    monkeypatch.setattr(all_checks, "checks", lambda asked: [*real(asked), tried])
    given = [str(folder), "--backend", "sim", "--out", str(folder / "out"), "--only", *only]
    monkeypatch.setattr(sys, "argv", ["all_checks.py", *given])
    assert all_checks.main() == code
    *_, first, second, third = capsys.readouterr().out.splitlines()
    if code:
        assert second == "0 of 0 good; not: none"
        assert third == "2 skipped: helper, failures"
    else:
        assert (first, second) == ("1 of 1 good; not: none", "1 skipped: helper")
        assert third == "models left out of: tried"


def test_a_model_that_is_not_there_is_left_out_of_closeness(models, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(all_checks.ROOT / "tests/model"))
    import closeness

    there, gone = models / "kjv-moe/kjv-Q4_0.gguf", models / "kjv-moe/kjv-Q0.gguf"
    monkeypatch.setattr(closeness, "given", lambda model, *_: (f"| {model.name} |", True))
    for named, code in ((f"{there}", 0), (f"{gone}", 1)):
        arguments = [named, str(gone), "--given", "--kv", "fp16"]
        monkeypatch.setattr(sys, "argv", ["closeness.py", *arguments])
        assert closeness.main() == code
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.endswith("not there, left out: kjv-Q0.gguf") or code
    assert last.startswith("0 of 0 rows")
