"""Compiled kernels for losses, gradients, sums and Newton-Schulz iterations, and when they replace those of torch."""
