"""The CPU backend: kernels as LLVM IR, compiled once, run by a pool of our own threads."""
