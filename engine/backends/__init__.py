"""What runs the tasks of a round.

local    this process, one task after another
members  one process for several runs, whose clients are trained in one block
ray/     workers of Ray, on one node or on several
"""
