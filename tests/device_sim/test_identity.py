"""Logits on simulated devices have the bits of the CPU backend, wherever the experts lie."""

import pytest

SIZES = [0, 1, 8, 16]


@pytest.mark.parametrize("cache", SIZES)
def test_any_cache_has_the_bits_of_the_cpu(lab, tiny_file, cache):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=cache)
    executor = lab.bind(backend, checkpoint)
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)
