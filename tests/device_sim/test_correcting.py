"""Rounds correct the split: not at once, not for little, and no bit depends on it."""

import numpy as np
import pytest
from attrs import evolve
from test_split import Pinned, Unstated

from strata_core.kernels.device.correcting import LEAST, PERIOD, Correction
from strata_core.kernels.device.split import Lane, Split, by_lanes, by_share
from strata_core.memory.address import bytes_at
from strata_core.sources.arena import Arena

BLOB, TOP = 2_650_000, 8
LINK, CPU = Lane(8e-6, 43e9), Lane(10e-6, 105.7e9)


def measured(link=LINK, cpu=CPU):
    return Split(table=by_lanes(64, BLOB, link, cpu), asked="auto", link=link, cpu=cpu)


class Rounds:
    """Rounds of layers with misses, whose part on the CPU takes as long as `real` says."""

    def __init__(self, real, layers=48, misses=8):
        self.real, self.misses = real, misses
        self.times, self.counts = (np.zeros((layers, 2), np.int64) for _ in range(2))
        self.correction = Correction(self.times, self.counts, 1e9, BLOB, TOP)
        self.now, self.told = 0, 0

    def one(self, split, slower=1.0):
        for layer in range(len(self.times)):
            mine = self.told or self.misses - int(split.table[self.misses])
            self.counts[layer] = mine, mine > 0
            took = slower * self.real.seconds(mine * BLOB) * 1e9
            self.times[layer] = self.now, self.now + took
            self.now += int(took) + 50_000
        return self.correction.after(split)

    def until_changed(self, split, rounds=10 * PERIOD):
        for number in range(1, rounds + 1):
            found = self.one(split)
            if found is not None:
                return number, found
        return rounds, None


def test_the_reference_machine_s_split_is_corrected():
    """Said to do 105.7 GB/s the CPU does 70 in rounds: 3 of 8 belong on the link, not 2."""
    split = measured()
    assert split.table[TOP] == 2
    rounds = Rounds(Lane(10e-6, 70e9))
    number, found = rounds.until_changed(split)
    assert number == 2 * PERIOD, "not within the first ones"
    assert found.table[TOP] == 3
    assert found.cpu.rate == pytest.approx(70e9, rel=0.05)
    assert (found.link, found.asked, found.corrections) == (LINK, "auto", 1)
    assert found.as_json(TOP)["corrections"] == 1
    assert rounds.until_changed(found) == (10 * PERIOD, None), "then it stays"


@pytest.mark.parametrize("factor", [0.93, 1.0, 1.08])
def test_a_little_changes_nothing(factor):
    real = Lane(CPU.start / factor, CPU.rate * factor)
    assert Rounds(real).until_changed(measured()) == (10 * PERIOD, None)


def test_a_faster_cpu_gets_more():
    split = measured(cpu=Lane(10e-6, 40e9))
    _, found = Rounds(Lane(10e-6, 90e9)).until_changed(split)
    assert found.table[TOP] < split.table[TOP]


def test_times_of_something_else_are_left_out():
    rounds, split = Rounds(CPU), measured()
    changed = [rounds.one(split, slower=50.0 if n % 5 == 0 else 1.0) for n in range(4 * PERIOD)]
    assert changed == [None] * (4 * PERIOD)


def test_too_little_work_tells_nothing():
    rounds, split = Rounds(Lane(10e-6, 20e9), layers=1), measured()
    for number in range(6 * PERIOD):
        rounds.misses = 8 if number % PERIOD < LEAST // 2 else 0
        found = rounds.one(split)
        assert found is None or number > 2 * PERIOD


def test_a_cpu_that_is_several_times_slower_is_seen_at_the_first_look():
    split, real = measured(), Lane(CPU.start * 5, CPU.rate / 5)
    number, found = Rounds(real).until_changed(split)
    assert number == 2 * PERIOD
    assert found.cpu.rate == pytest.approx(real.rate, rel=0.05)
    assert found.table.tolist() == measured(cpu=found.cpu).table.tolist()


@pytest.mark.parametrize("slower", [50, 1000])
def test_a_cpu_that_is_far_slower_keeps_one_expert_to_be_seen_by(slower):
    split = measured()
    rounds = Rounds(Lane(CPU.start * slower, CPU.rate / slower))
    number, found = rounds.until_changed(split)
    assert number == 2 * PERIOD, "at the first look"
    assert found.table[: TOP + 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert not found.takes_all(TOP)
    assert rounds.until_changed(found) == (10 * PERIOD, None), "then it stays"


def test_a_link_that_takes_every_miss_keeps_them():
    """The CPU has what the link cannot reach; in other layers rounds were made without it."""
    split = measured(cpu=Lane(1e-3, 1e9))
    assert split.takes_all(TOP)
    rounds = Rounds(Lane(10e-6, 90e9))
    rounds.told = 3
    assert rounds.until_changed(split) == (10 * PERIOD, None)


def test_rounds_without_work_for_the_cpu_leave_nothing_behind():
    rounds, split = Rounds(Lane(10e-6, 20e9), misses=0), measured()
    assert rounds.until_changed(split) == (10 * PERIOD, None)
    assert (rounds.correction._seen, rounds.correction._ratios) == ([], [])
    rounds.misses = 8
    number, found = rounds.until_changed(split)
    assert number == PERIOD
    assert found.corrections == 1


def test_bits_stay_while_the_table_changes(lab, tiny_file):
    """What start-up found is far off here, and so is its table."""
    checkpoint = tiny_file()
    runtime = lab.runtime()
    backend = lab.backend(Unstated(runtime), expert_cache=3, dispatch="stepped", threads=2)
    backend.open_contexts()
    source = Arena(checkpoint.experts, Pinned(runtime), lab.quiet())
    split = backend._split

    def doubtful(*given):
        link, cpu = Lane(0.5, 1e3), Lane(1e-9, 1e15)
        return evolve(split(*given), table=by_share(16, 0.5), link=link, cpu=cpu)

    backend._split = doubtful
    executor = lab.bind(backend, checkpoint, source)
    want, before = lab.cpu(checkpoint).tobytes(), executor.lanes()
    assert before["table"] == [0, 0, 1]
    for _ in range(5):
        assert lab.logits(executor, size=1).tobytes() == want
    after, table = executor.lanes(), executor._maker.split.table
    assert after["corrections"] > 0
    assert after["table"] == [0, 0, 0]
    assert after["rates"]["cpu"]["gb_s"] < before["rates"]["cpu"]["gb_s"]
    runtime.synchronize(executor._maker.stream)
    share = bytes_at(executor._maker.places.regions.at("share"), table.nbytes)
    assert share.view(np.int32).tolist() == table.tolist()
    assert lab.logits(executor, size=4).tobytes() == want
    executor.close()
    source.close()
    lab.check_closed(backend)
