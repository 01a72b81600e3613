"""Benchmarks: programs that measure the package, print tables, and write JSON and figures."""
