"""Sums in the order of a tree. The bits are the same whoever adds them.

tree          the tree over the tasks of a phase and the blocks of each task, results of tasks, sums at its nodes
accumulator   the sums of one task, which a worker makes
round_totals  the sums of a phase, which the driver makes from the results of the tasks
"""
