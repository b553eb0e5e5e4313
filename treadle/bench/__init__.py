"""Measurements: machine, kernels, engine, servers, and files with random weights to measure on."""
