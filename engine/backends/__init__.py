"""What runs the tasks of a round.

local    this process, one task after another
ray/     workers of Ray, on one node or on several
"""
