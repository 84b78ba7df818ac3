"""The simulated devices from the command line: the tokens of the CPU, and the log of a start."""

from __future__ import annotations

import pytest

ASKED = ("demo", "In the beginning", "-n", "8", "--json", "--threads", "1")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The document of the same request on the CPU."""
    import json
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "strata_core", "generate", *ASKED, "--backend", "cpu"],
        capture_output=True,
        check=True,
        timeout=240,
    )
    return json.loads(done.stdout)


DEVICES = [
    ("0.02", "--expert-cache", "auto"),
    ("0.02", "--expert-cache", "0"),
    ("0.008", "--resident-experts"),
    ("0.008", "--mmap-experts", "--sim-pin-budget", "0.1"),
    (
        "0.006", "--sim-devices", "3", "--expert-cache", "30", "--device", "2,0,1",
        "--expert-cache-device1", "40", "--expert-cache-device2", "auto",
    ),
]  # fmt: skip


@pytest.mark.parametrize("flags", DEVICES, ids=" ".join)
def test_tokens_and_logits_are_those_of_the_cpu(flags, strata, expected) -> None:
    result = strata("generate", *ASKED, "--backend", "sim", "--sim-vram", *flags)
    assert result.code == 0, result.err
    for member in ("text", "token_ids", "first_logits_sha256"):
        assert result.document[member] == expected[member]
    lanes = result.document["counters"]
    assert sum(lane["experts"] for lane in lanes.values()) > 0
    assert (lanes["helper"]["experts"] > 0) == ("--expert-cache-device1" in flags)
    # who computes the misses is measured: the CPU, or the device over the link
    misses = lanes["cpu"]["experts"] + lanes["pcie"]["experts"]
    assert (misses > 0) == (flags[0] != "0.02" or flags[-1] == "0")
    assert "SIM" in result.err
    assert "context ready" in result.err


def test_quiet_shows_warnings_alone(strata) -> None:
    result = strata("generate", *ASKED[:-3], "-q", "--backend", "sim", "--sim-vram", "0.02")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--sim-vram", "0.001"), "does not fit: vram0 (SIM0) is short by"),
        (("--sim-vram", "0.006", "--expert-cache", "150"), "does not fit: vram0 (SIM0)"),
        (("--sim-pin-budget", "0.05"), "--sim-pin-budget 0.05 is too little for the contexts of 1"),
        (("--sim-pin-budget", "0.063"), "does not fit: pinned is short by"),
        (("--device", "3"), "--device 3: there is no such device"),
        (("--expert-cache-device1", "5"), "--expert-cache-device1 5 has no device"),
    ],
)
def test_what_cannot_start_says_why(flags, says, strata) -> None:
    result = strata("generate", "demo", "x", "-n", "1", "--backend", "sim", *flags)
    assert result.code in (1, 2)
    assert says in result.error_lines[0]


def test_what_else_would_fit_is_named_and_does(strata) -> None:
    tight = ("--backend", "sim", "--sim-vram", "0.006", "--expert-cache", "150")
    result = strata("plan", "demo", *tight)
    assert result.code == 1
    (line,) = [text for text in result.out.splitlines() if text.startswith("    --expert-cache")]
    fewer = line.split()[1]
    asked = (*tight[:-1], fewer)
    assert strata("generate", "demo", "x", "-n", "1", *asked).code == 0


def test_flags_of_devices_are_refused_where_there_are_none(strata) -> None:
    for flags in (("--sim-vram", "1"), ("--expert-cache", "5"), ("--device", "0")):
        result = strata("generate", "demo", "x", "--backend", "cpu", *flags)
        assert result.code == 2
        assert result.error_lines[0] == f"strata: {flags[0]} has no effect here"


@pytest.mark.parametrize("share", ["0", "0.37", "1", "auto"])
def test_the_share_of_the_link_is_told_and_changes_no_token(share, strata, expected) -> None:
    flags = ("--backend", "sim", "--expert-cache", "60", "--pcie-frac", share)
    result = strata("generate", *ASKED, *flags)
    assert result.code == 0, result.err
    for member in ("token_ids", "first_logits_sha256"):
        assert result.document[member] == expected[member]
    lanes, counters = result.document["lanes"], result.document["counters"]
    assert lanes["pcie_frac"] == (share if share == "auto" else float(share))
    assert set(lanes["rates"]) == ({"link", "cpu"} if share == "auto" else set())
    assert ("the link moves" in result.err) == (share == "auto")
    if share != "auto":
        assert (counters["pcie"]["experts"] > 0) == (share != "0")
        assert (counters["cpu"]["experts"] > 0) == (share != "1")
    assert expected["lanes"] is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--backend", "sim", "--pcie-frac", "1.5"), "of at least 0 and at most 1, or auto,"),
        (("--backend", "sim", "--pcie-frac", "some"), "of at least 0 and at most 1, or auto,"),
        (("--backend", "cpu", "--pcie-frac", "0.5"), "--pcie-frac has no effect here"),
    ],
)
def test_a_share_that_cannot_be_is_refused(flags, says, strata) -> None:
    result = strata("generate", *ASKED, *flags)
    assert result.code == 2
    assert says in result.out


def test_a_prompt_too_long_for_a_context_that_a_chunk_cut_says_so(strata) -> None:
    ids = ",".join(["5"] * 2000)
    flags = ("--backend", "sim", "--sim-vram", "0.0225", "--prefill", "1024")
    result = strata("generate", "demo", "--prompt-ids", ids, "-n", "1", "-q", *flags)
    assert result.code == 2
    what, why, _ = result.error_lines
    assert "too long" in what
    assert "beside chunks of 1024 tokens, which take " in why
