"""Measurements: the machine, the kernels, the engine, a server, and files with random weights to measure on."""
