"""Who takes part in a round, and in which portions of work. All of it follows from the configuration and the round.

samplers  how the clients of a round are chosen; some weigh clients or learn from their losses, as oort does
tasks     a cohort as blocks (clients that run at once) and tasks (blocks that a worker takes at a time)
"""
