"""Who takes part in a round, and in which portions of work. All of it follows from the configuration and the round.

sampling  uniform cohorts, Poisson sampling, clients in turns
samplers  samplers that weigh clients or learn from their losses; oort is one of them
tasks     a cohort as blocks (clients that run at once) and tasks (blocks that a worker takes at a time)
"""
