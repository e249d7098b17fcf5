"""Sums in the order of a tree. The bits are the same whoever adds them."""
