"""The kernel table, programs made of kernels, and the kernels themselves."""
