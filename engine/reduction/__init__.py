"""Sums in the order of a tree, the same bits whoever adds them."""
