"""What rounds of one token have of their own: frames, latches, counts, and their bits."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_doorbell import bound_to, end, silent_host

from strata_core.checkpoint.hyper import Rope
from strata_core.errors import EngineError
from strata_core.interfaces import Limits, Window
from strata_core.kernels.cpu.hand_over import NO_FAILURE, TIMED_OUT
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.exchange import MOST_HELPERS, Exchange, Shape
from strata_core.kernels.device.latches import Latches
from strata_core.kernels.device.layout import HELPER, HIT, HOST, LANES, LINK
from strata_core.kernels.device.served import Served
from strata_core.kernels.rope import Turns, angles
from strata_core.memory.address import address_of, bytes_at

PLAIN = Rope(theta=10000.0, dim=8)
ROPES = (PLAIN, Rope(theta=5e5, dim=8, scaling="yarn", factor=4.0, original_context=512))
positions = st.integers(0, 1 << 20)


def settled(tokens, layers=2):
    """An exchange in memory of its own, which has to be kept."""
    shape = Shape(tokens, top_k=2, inputs=4, outputs=4, layers=layers, vocabulary=3, half=4)
    exchange = Exchange.plan(shape)
    memory = np.zeros(exchange.nbytes + 64, np.uint8)
    address = address_of(memory)
    exchange.settle(address + -address % 64)
    return exchange, memory


def frame(exchange):
    return bytes_at(exchange.address, exchange.frame.nbytes)


@given(st.lists(positions, min_size=1, max_size=9), st.sampled_from(ROPES))
def test_turns_are_the_angles_of_each_position(asked, rope):
    """Wherever the one before was, and also as windows of several have them."""
    turns = Turns(rope)
    near = [*asked, *(p + 1 for p in asked), *asked]
    cos, sin = angles(rope, np.array(near, np.int32))
    for position, *rows in zip(near, cos, sin, strict=True):
        got = [np.frombuffer(row, np.float32) for row in turns.at(position)]
        alone = angles(rope, np.array([position], np.int32))
        for mine, one, many in zip(got, alone, rows, strict=True):
            assert mine.tobytes() == one.tobytes() == many.tobytes()


@given(
    st.integers(1, (1 << 63) - 1),
    st.integers(0, (1 << 31) - 1),
    positions,
    st.tuples(*[st.integers(0, (1 << 64) - 1)] * 4),
    st.sampled_from([1, 3, 8]),
)
def test_a_token_s_frame_is_that_of_a_window_of_one(number, token, position, place, tokens):
    """Every byte, whatever was there before; a window of several after it finds its own."""

    class Program:
        rope = PLAIN

    def several(count):
        return Window(
            ids=np.full(count, token, np.int32),
            positions=np.arange(position, position + count, dtype=np.int32),
            slots=np.zeros(count, np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
            kernel_class="window",
        )

    (whole, _kept), (one, _too) = settled(tokens), settled(tokens)
    for before in (0xA5, 0x00):
        frame(whole)[:] = frame(one)[:] = before
        whole.fill_frame(number, several(1), [place], Program)
        one.fill_token(number, token, position, place, Turns(PLAIN).at(position))
        assert frame(one).tobytes() == frame(whole).tobytes()
        assert frame(one).any()
    for exchange in (whole, one):
        exchange.fill_frame(number, several(tokens), [place] * tokens, Program)
    assert frame(one).tobytes() == frame(whole).tobytes()


def test_the_lowest_latch_of_any_part_is_told():
    exchange, _memory = settled(1)
    host, failure = np.full(1, NOTHING_LATCHED, np.uint32), np.zeros(2, np.int64)
    device = exchange.array("result", np.uint32, 32)
    device[:] = NOTHING_LATCHED
    lines = exchange.array("helper status", np.uint32, MOST_HELPERS, 16)
    lines[:] = 0  # that of a helper which is not there tells nothing
    latches = Latches.of(exchange, (1, 3), host, failure)
    latches.clear()
    assert lines[:, 0].tolist() == [NOTHING_LATCHED, 0, NOTHING_LATCHED]
    assert latches.lowest() == NOTHING_LATCHED
    for cell, op in ((lines[2], 9), (host, 7), (lines[0], 5), (device, 3)):
        cell[0] = op
        assert latches.lowest() == op
    device[0] = host[0] = NOTHING_LATCHED
    latches.clear()
    assert latches.lowest() == NOTHING_LATCHED


def test_failures_and_late_answers_are_told():
    exchange, _memory = settled(1)
    failure = np.array([TIMED_OUT, 4], np.int64)
    latches = Latches.of(exchange, (), np.zeros(1, np.uint32), failure)
    assert latches.failure.tolist() == [TIMED_OUT, 4]
    latches.clear()
    assert failure[0] == latches.failure[0] == NO_FAILURE
    late = exchange.array("result", np.uint32, 32)[16:]
    for layer in (0, 3, NOTHING_LATCHED):
        late[0] = layer
        assert latches.late[0] == layer


def test_lanes_served_what_the_last_round_that_counts_left():
    told = np.arange(2 * LANES, dtype=np.uint64).reshape(2, LANES)
    served = Served(told, [10, 1000])
    whole = served.by_lane()
    lanes = {"hit": HIT, "pcie": LINK, "cpu": HOST}
    for name, lane in lanes.items():
        counts = told[:, lane].tolist()
        assert whole[name] == {"experts": sum(counts), "bytes": counts[0] * 10 + counts[1] * 1000}
    assert whole["helper"]["experts"] == int(told[:, HELPER:].sum())
    told += 1  # a round is under way
    assert served.by_lane() == whole
    served.put_back()
    assert told.tolist() == np.arange(2 * LANES).reshape(2, LANES).tolist()
    told += 5
    served.keep()
    assert served.by_lane()["hit"]["experts"] == whole["hit"]["experts"] + 10


def test_two_sequences_in_turn_have_the_bits_of_one_window_each(lab, tiny_file, tools):
    """One far behind the other, so that nothing that is kept of a round fits the next one."""
    checkpoint, far = tiny_file(), 70
    ids = (np.arange(far + 4) * 31 % 290 + 3).astype(np.int32)
    limits = Limits(tokens=80, logits=80, context=600, kv_type="fp16")
    want = lab.cpu(checkpoint, limits, ids)
    backend = lab.backend(expert_cache=5)
    executor = lab.bind(backend, checkpoint, limits=limits)
    long, short = executor.open_sequence(), executor.open_sequence()
    executor.run(tools.window(ids[:far], slot=long, rows=[]))
    for n in range(4):
        for slot, at in ((long, far + n), (short, n)):
            got = executor.run(tools.window(ids[at : at + 1], start=at, slot=slot))
            assert got.tobytes() == want[at].tobytes()
    # a sequence that is closed takes its place with it
    executor.close_sequence(long)
    executor.close_sequence(short)
    slots = [executor.open_sequence() for _ in range(2)]
    for n in range(2):
        for slot in slots:
            got = executor.run(tools.window(ids[n : n + 1], start=n, slot=slot))
            assert got.tobytes() == want[n].tobytes()
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1], [2], [], [0, 2]])
def test_rows_are_given_in_the_order_that_they_are_asked_for_in(lab, tiny_file, tools, rows):
    checkpoint = tiny_file()
    want = lab.cpu(checkpoint)[:4]
    backend = lab.backend(expert_cache=5)
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    for _ in range(2):
        got = executor.run(tools.window(tools.ids[:4], slot=slot, rows=rows))
        assert got.tobytes() == want[rows].tobytes()
    lab.check_closed(backend, executor)


def test_a_token_whose_answer_is_late_is_computed_again(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, threads=2)
    want = lab.cpu(checkpoint)
    slot = executor.open_sequence()
    for n in range(4):
        if n == 2:
            before, number = executor.counters(), executor._number
            with silent_host(executor):
                got = executor.run(tools.window(tools.ids[n : n + 1], start=n, slot=slot)).copy()
            assert executor._number == number + 2
            after = executor.counters()
            served = sum(after[lane]["experts"] - before[lane]["experts"] for lane in after)
            assert served == 2 * checkpoint.hyper.top_k
        else:
            got = executor.run(tools.window(tools.ids[n : n + 1], start=n, slot=slot))
        assert got.tobytes() == want[n].tobytes()
    assert executor.lanes()["dispatch"]["time_outs"] == 1
    assert sum(int(row.sum()) for row in executor.picks().values()) == 4 * 2 * 2
    executor.close_sequence(slot)
    end(lab, backend, source, executor)


def test_windows_of_changing_sizes_have_their_own_counts(lab, tiny_file, tools):
    """The CPU computes everything: it is told how many rows there are, whatever was before."""
    checkpoint = tiny_file()
    want = lab.cpu(checkpoint)
    backend = lab.backend(expert_cache=0, threads=2)
    executor = lab.bind(backend, checkpoint)
    slot, start = executor.open_sequence(), 0
    for size in (1, 3, 1, 1, 2, 5, 1):
        here = slice(start, start + size)
        got = executor.run(tools.window(tools.ids[here], start=start, slot=slot))
        assert got.tobytes() == want[here].tobytes()
        start += size
    assert executor.counters()["cpu"]["experts"] == start * 2 * checkpoint.hyper.top_k
    lab.check_closed(backend, executor)


def test_after_a_prompt_that_failed_the_next_window_tries_to_restore_again(lab, tiny_file, tools):
    backend = lab.backend(expert_cache=5)
    executor = lab.bind(backend, tiny_file())
    slot = executor.open_sequence()
    prompts, asked = executor._prompts, []
    restore = prompts.restore

    class Watched:
        """Restoring fails the first time."""

        def __getattr__(self, name):
            return getattr(prompts, name)

        def restore(self):
            asked.append(len(asked))
            if len(asked) == 1:
                raise EngineError("not yet", "it was refused", "again")
            restore()

    executor._prompts = Watched()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    assert asked == [], "no prompt came before"
    prompt = evolve(tools.window(tools.ids[:9], slot=slot, rows=[8]), kernel_class="prompt")
    executor.run(prompt)
    with pytest.raises(EngineError, match="not yet"):
        executor.run(tools.window(tools.ids[9:10], start=9, slot=slot))
    want = lab.cpu(tiny_file())
    for n in (9, 10):
        got = executor.run(tools.window(tools.ids[n : n + 1], start=n, slot=slot))
        assert got.tobytes() == want[n].tobytes()
    assert asked == [0, 1], "once it was done"
    lab.check_closed(backend, executor)
