"""Ranges, retries, coalescing, mirrors, and tokens that are those of the whole pack."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, StrataError, UsageError
from strata_core.interfaces import Expert
from strata_source_fsspec.command import main, mirror
from strata_source_fsspec.remote import FIRST_PAUSE, LONGEST_PAUSE, Remote, parse_options
from strata_source_fsspec.source import RangeFetcher, read_digests


@pytest.fixture
def remote(server):
    """remote(**options): the server's experts.bin, read without real pauses; they are noted."""

    def make(**options) -> Remote:
        return Remote(f"{server.url}/experts.bin", pause=lambda s: make.pauses.append(s), **options)

    make.pauses = []
    return make


@pytest.fixture
def fetcher(mirrored: Path, remote):
    """fetcher(gap, largest, **options): a fetcher of the server's experts."""

    def make(gap: int = 0, largest: int = 1 << 30, **options) -> RangeFetcher:
        experts = open_checkpoint(mirrored).experts
        digests = read_digests(mirrored, experts)
        return RangeFetcher(remote(**options), experts, digests, gap, largest)

    return make


def fetch(made: RangeFetcher, pack: Path, experts: list[Expert]) -> None:
    """Fetch and compare with the whole pack."""
    whole = open_checkpoint(pack).experts
    buffers = [bytearray(whole.layouts[e.layer].nbytes) for e in experts]
    made.fetch(experts, [memoryview(b) for b in buffers])
    for expert, buffer in zip(experts, buffers, strict=True):
        assert bytes(buffer) == b"".join(v.tobytes() for v in whole.mapped(expert))


@pytest.mark.parametrize("fault", ["drop", "cut", "short", "spoil", 500, 503, 429])
def test_a_passing_fault_is_survived(fault, server, fetcher, pack: Path) -> None:
    server.faults.extend([fault] * 3)
    made = fetcher(retries=3)
    fetch(made, pack, [Expert(1, 2)])
    traffic = made._remote.traffic
    # The HTTP library itself asks once more where a connection is closed before any answer.
    assert traffic.retries == (1 if fault == "drop" else 3)
    assert traffic.requests == traffic.retries + 1
    assert len(server.ranges) == 4
    assert len(set(server.ranges)) == 1


def test_a_slow_answer_is_given_up_and_asked_for_again(server, fetcher, pack: Path) -> None:
    server.faults.extend(["slow"])
    made = fetcher(retries=1, timeout=0.2)

    def given_up(_seconds: float) -> None:
        made._remote._timeout = 60.0
        server.patient.set()

    made._remote._pause = given_up
    fetch(made, pack, [Expert(0, 0)])
    assert made._remote.traffic.retries == 1


@pytest.mark.parametrize("fault", ["drop", "cut", "short", "spoil", 500])
def test_a_lasting_fault_names_expert_and_address(fault, server, fetcher, pack: Path) -> None:
    server.always = fault
    made = fetcher(retries=2)
    with pytest.raises(StrataError) as caught:
        fetch(made, pack, [Expert(2, 3)])
    assert "expert 3 of layer 2" in str(caught.value)
    assert server.url in caught.value.what
    assert "tried 3 times" in caught.value.why
    server.always = None
    fetch(made, pack, [Expert(2, 3)])


@pytest.mark.parametrize("fault", [401, 403, 404, 410, "whole"])
def test_what_will_not_change_is_not_asked_for_again(fault, server, fetcher, pack: Path) -> None:
    server.always = fault
    made = fetcher(retries=5)
    with pytest.raises(StrataError, match="tried once"):
        fetch(made, pack, [Expert(0, 1)])
    assert made._remote.traffic.retries == 0


def test_pauses_grow_up_to_a_limit(server, remote) -> None:
    server.always = 503
    with pytest.raises(StrataError):
        remote(retries=9).read(0, 10, "ten bytes")
    longest = [min(LONGEST_PAUSE, FIRST_PAUSE * 2**i) for i in range(9)]
    assert len(remote.pauses) == 9
    assert all(top / 2 <= s <= top for s, top in zip(remote.pauses, longest, strict=True))


def test_pauses_leave_the_process_s_random_numbers_alone(server, remote) -> None:
    import random

    server.faults.extend([503] * 3)
    random.seed(7)
    before = random.getstate()
    remote(retries=3).read(0, 10, "ten bytes")
    assert random.getstate() == before


def test_neighbours_are_read_with_one_request(server, fetcher, pack: Path) -> None:
    made = fetcher(gap=4096)
    groups = made.groups([Expert(1, i) for i in (5, 0, 1, 2)])
    assert [[e.index for e in group] for group in groups] == [[0, 1, 2], [5]]
    for group in groups:
        fetch(made, pack, list(group))
    assert len(server.ranges) == 2


def test_gap_and_largest_request_bound_what_is_read_together(fetcher) -> None:
    experts = [Expert(0, i) for i in range(7)]
    together = fetcher(gap=1 << 30)
    assert [len(g) for g in together.groups(experts)] == [7]
    assert [len(g) for g in together.groups([experts[0], experts[6]])] == [2]
    size = together._range(experts[0])
    stride = together._range(experts[1])[0] - size[0]
    assert [len(g) for g in fetcher(gap=0).groups(experts)] == [1] * 7 or stride == size[1]
    assert [len(g) for g in fetcher(1 << 20, 2 * stride).groups(experts)] == [2, 2, 2, 1]
    assert [len(g) for g in fetcher(1 << 20, 1).groups(experts)] == [1] * 7


def test_tokens_are_those_of_the_whole_pack(tmp_path: Path, strata) -> None:
    from unreliable_server import serving

    strata("pack", "demo", str(tmp_path / "whole"))
    call = ("-n", "16", "In the beginning")
    before = strata("generate", str(tmp_path / "whole"), *call)
    with serving(tmp_path / "whole") as server:
        mirror(server.url, tmp_path / "mirror")
        assert not (tmp_path / "mirror" / "experts.bin").exists()
        server.faults.extend(["drop", None, "cut", 503] * 3)
        after = strata("generate", str(tmp_path / "mirror"), *call)
    assert {"source": "fsspec"}.items() <= {
        item["role"]: item["name"] for item in after["selections"]
    }.items()
    assert after["first_logits_sha256"] == before["first_logits_sha256"]
    assert after["token_ids"] == before["token_ids"]


def test_a_server_that_is_gone_ends_the_command_with_the_address(mirrored: Path, strata) -> None:
    call = ("--prompt-ids", "1,2", "--fsspec-url", "http://127.0.0.1:9/experts.bin")
    error = strata("generate", str(mirrored), *call, STRATA_FSSPEC_RETRIES="0", code=1)["error"]
    assert "http://127.0.0.1:9/experts.bin" in error["what"]
    assert "tried once" in error["why"]


def test_archives_and_memory_are_read_too(pack: Path, mirrored: Path, tmp_path: Path) -> None:
    import fsspec

    archive = tmp_path / "pack.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for file in pack.iterdir():
            target.write(file, f"my-pack/{file.name}")
    memory = fsspec.filesystem("memory")
    memory.pipe("/far/experts.bin", (pack / "experts.bin").read_bytes())
    experts = open_checkpoint(mirrored).experts
    digests = read_digests(mirrored, experts)
    for url in (f"zip://my-pack/experts.bin::{archive}", "memory://far/experts.bin"):
        fetch(RangeFetcher(Remote(url), experts, digests, 0), pack, [Expert(1, 1), Expert(1, 2)])
    memory.rm("/far", recursive=True)
    mirror(f"zip://my-pack::{archive}", tmp_path / "from-zip")
    assert open_checkpoint(tmp_path / "from-zip").form == "fsspec"
    address = (tmp_path / "from-zip" / "experts.url").read_text().strip()
    assert address == f"zip://my-pack/experts.bin::{archive}"


def test_a_mirror_knows_where_a_relative_path_led(pack: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(pack.parent)
    mirror(pack.name, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    address = (tmp_path / "out" / "experts.url").read_text().strip()
    assert Remote(address).size() == (pack / "experts.bin").stat().st_size


def test_a_mirror_is_whole_or_not_there(pack: Path, server, tmp_path: Path) -> None:
    server.always = "drop"
    with pytest.raises(StrataError):
        mirror(server.url, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(StrataError, match="tried once"):
        mirror(str(tmp_path / "nowhere"), tmp_path / "out")
    assert main(["mirror", str(pack), str(tmp_path / "good")]) == 0
    assert main(["mirror", str(pack), str(tmp_path / "good")]) == 2
    assert open_checkpoint(tmp_path / "good").form == "fsspec"


@pytest.mark.parametrize("manifest", ["[]", "{}", "x", '{"dense": {"bytes": 1}, "files": 3}'])
def test_a_manifest_that_is_none_is_refused(manifest: str, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "strata-pack.json").write_text(manifest)
    with pytest.raises(UsageError, match="not the manifest of a pack"):
        mirror(str(tmp_path / "bad"), tmp_path / "out")


@pytest.mark.parametrize("name", ["../../x.json", "/etc/x.json", "a/b.json", "run.sh"])
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    import json

    (tmp_path / "bad").mkdir()
    document = {"dense": {"bytes": 0}, "files": [{"name": name, "bytes": 1}]}
    (tmp_path / "bad" / "strata-pack.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="not the manifest of a pack"):
        mirror(str(tmp_path / "bad"), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_options_are_a_json_object() -> None:
    assert parse_options(None) == {}
    assert parse_options('{"anon": true}') == {"anon": True}
    for text in ("[1]", "{", "3"):
        with pytest.raises(UsageError, match="STRATA_FSSPEC_OPTIONS"):
            parse_options(text)
    with pytest.raises(UsageError, match="nothing-such"):
        Remote("nothing-such://x/experts.bin")


def test_a_manifest_without_hashes_is_refused(mirrored: Path) -> None:
    experts = open_checkpoint(mirrored).experts
    (mirrored / "strata-pack.json").write_text('{"experts": {"layers": []}}')
    with pytest.raises(CheckpointError, match=r"strata-pack\.json"):
        read_digests(mirrored, experts)
