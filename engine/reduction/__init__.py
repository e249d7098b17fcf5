"""Sums in the order of a tree. The bits are the same whoever adds them.

tree         the tree over the tasks of a phase and the blocks of each task, results of tasks, the sums of a phase
accumulator  the sums of one task, which a worker makes
"""
