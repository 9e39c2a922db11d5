"""Kernels of our own for Metal and CUDA, and the trials that decide whether a device uses them."""
