"""How many buffers prompts have for experts on their way: slots that a cache lends, or their own.

Pure: a plan and a start count by the same rules.
"""

from __future__ import annotations

WAVE = 16
"""Experts that are computed together, and copied before that."""

AHEAD = 2
"""Layers whose experts are on their way to a device while earlier ones are computed."""

LEAST = 4
"""A cache with fewer slots lends none."""

OWN_WAVE = 8
"""As WAVE, of the fewest buffers that are taken where a cache has nothing to lend."""


def wanted_buffers(outside: int, layers: int) -> int:
    """Buffers for the experts of the next layers that no slot holds, and the wave that is computed.

    `outside` are those of all `layers` together.
    """
    each = -(-outside // max(1, layers))
    return max(2 * WAVE, AHEAD * each + WAVE)


def lendable(cached: int, total: int, layers: int) -> int:
    """Slots of the largest size that a cache of `cached` of all experts lends at most.

    Half of them: what is lent has to be brought as well, once a chunk and once behind the prompt.
    None where nothing is known of the layers.
    """
    if cached < LEAST or cached >= total or not layers:
        return 0
    most = max(2 * OWN_WAVE, cached // 2)
    return min(cached, most, wanted_buffers(total - cached, layers))


def own_buffers(cached: int, experts: int, layers: int, room: int) -> int:
    """Buffers to take for prompts beside a cache of `cached` of all experts; 0 where it lends.

    `experts` are those of each of `layers` layers; `room` is how many buffers may be taken to be
    ahead of the device. Two small waves are taken in any case.
    """
    if cached >= min(LEAST, experts * layers):
        return 0
    wanted = min(wanted_buffers(experts * layers - cached, layers), experts * layers)
    return max(2 * min(OWN_WAVE, experts), min(room, wanted))
