"""How a run will be computed: blocks and kernels are measured and proven, and one step is tried."""
