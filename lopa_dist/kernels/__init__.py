"""Kernels, each also in a plain-torch form."""
