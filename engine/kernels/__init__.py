"""Which kernels compute gradients: torch's, or the compiled ones in csrc/."""
