"""Kernels of accelerators: one table of them, and the executor that runs programs through it."""
