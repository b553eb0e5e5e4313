"""Weights of model files: readers and packing."""
