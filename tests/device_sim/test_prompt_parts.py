"""The parts of prompts on devices: what a cache lends, and which experts go together."""

import numpy as np
import pytest

from strata_core.cache.lend import lend
from strata_core.cache.slots import SlotClass, SlotPool
from strata_core.interfaces import Expert
from strata_core.kernels.device.layout import WAVE as WAVE_LINE
from strata_core.kernels.device.prompt_waves import Ring, asks_for_all, plan_waves
from strata_core.plan.lending import LEAST, OWN_WAVE, WAVE, own_buffers


def pool_of(*classes):
    """(bytes, slots) of each class, experts in the order of the classes' turns."""
    made, places, start = [], {}, 1 << 20
    for layer, (nbytes, count) in enumerate(classes):
        made.append(SlotClass(nbytes, start, count))
        places |= {Expert(layer, i): made[-1].slot(i) for i in range(count)}
        start += 1 << 20
    return SlotPool(0, tuple(made), places)


@pytest.mark.parametrize("gone", [(), (0, 3, 8), (1, 2, 3, 4)])
@pytest.mark.parametrize(
    "classes",
    [((256, 9),), ((256, 40), (512, 40)), ((256, 3), (768, 9)), ((512, 6), (256, 8))],
)
def test_loans_are_whole_slots_with_experts_from_the_end(classes, gone):
    """Slots without an expert are never touched: one may be on its way there."""
    pool = pool_of(*classes)
    for index in gone:
        pool.places.pop(Expert(0, index), None)
    largest = max(n for n, _ in classes)
    loan = lend(pool, largest)
    assert 0 < len(loan.buffers) <= 2 * WAVE
    held = [range(pool.places[e], pool.places[e] + classes[e.layer][0]) for e in loan.experts]
    lent = {at for each in held for at in each}
    taken = [at for b in loan.buffers for at in range(b, b + largest)]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= lent
    assert all(set(each) & set(taken) for each in held), "none is lent for nothing"
    largest_class = max(range(len(classes)), key=lambda n: classes[n][0])
    last = max(at for e, at in pool.places.items() if e.layer == largest_class)
    assert last in {pool.places[e] for e in loan.experts}


def test_small_caches_lend_nothing():
    assert lend(None, 256).buffers == ()
    assert lend(pool_of((256, LEAST - 1)), 256).buffers == ()
    assert own_buffers(LEAST - 1, 128, 48, 0) == 2 * OWN_WAVE
    assert own_buffers(0, 4, 48, 0) == 8
    assert own_buffers(LEAST, 128, 48, 999) == 0
    assert own_buffers(2, 2, 1, 999) == 0, "all experts are in slots"


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_waves_hold_each_expert_once_and_take_turns(tiny_file, buffers):
    layout = tiny_file().experts.layouts[0]
    slots = {Expert(0, i): 4096 * i for i in (1, 5)}
    ring = Ring.of([1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20][:buffers])
    table = np.zeros(8, WAVE_LINE)
    waves, turn = plan_waves(0, layout, range(8), slots, ring, 0, table)
    assert sorted(table["expert"].tolist()) == list(range(8))
    assert [w.begin for w in waves] == np.cumsum([0, *(w.count for w in waves)])[:-1].tolist()
    assert waves[0].part is None
    assert waves[0].count == 2
    turns = [w.part for w in waves[1:]]
    assert turns == [n % len(ring.parts) for n in range(len(turns))]
    assert turn == len(turns) % len(ring.parts)
    for wave in waves[1:]:
        for line, (index, address) in zip(table[wave.begin :], wave.moves, strict=False):
            assert line["expert"] == index
            assert line["down"] == address + layout.parts[2].offset
            assert address in ring.parts[wave.part]


def test_long_chunks_ask_for_all_experts():
    assert asks_for_all(64, 8, 128)
    assert not asks_for_all(63, 8, 128)
