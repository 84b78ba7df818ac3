// Rounds in which the device waits for the host: the host has computed its part of a layer once its
// word holds the number of the round.
#ifndef STRATA_WAIT_H
#define STRATA_WAIT_H

// One thread; `bound` counts ticks. Who has waited so long latches the number of the layer in `late`,
// and every later wait of the round falls through: what the round computes is rubbish from there on,
// and the host, which is told of the latch, computes the window again.
DEV void await_host(const i64* answer, const i64* round, u32* late, i64 bound, int layer) {
  const volatile u32* latched = late;
  i64 number = *round;
  u64 began = 0;
  while (*latched == ~0u && word_of_host(answer) != number) {
    u64 now = ticks();
    if (!began) began = now;
    else if (now - began > (u64)bound) latch(late, layer);
  }
}

// All threads of the block; nothing where there is no word to wait for.
DEV void await_lanes(const i64* answer, const i64* round, u32* late, i64 bound, int layer) {
  if (!answer) return;
  if (threadIdx.x == 0) await_host(answer, round, late, bound, layer);
  __syncthreads();
}

#endif
