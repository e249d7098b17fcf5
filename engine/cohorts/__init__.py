"""Who takes part in a round, and in which portions of work. All of it follows from the configuration and the round.

sampling  draws that follow from the seed and the number of the round alone
samplers  how the clients of a round are chosen; some weigh clients or learn from their losses, as oort does
tasks     a cohort as blocks (clients that run at once) and tasks (blocks that a worker takes at a time)
"""
