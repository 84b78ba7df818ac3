"""Model families: each writes its layers once, as a program of kernels."""
