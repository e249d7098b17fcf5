"""The executor of many runs, which searches and studies share. It runs on Ray Tune.

source      the interface of what hands out the runs, and what is exchanged with it
executor    connects to Ray and computes how many runs fit
trials      the driver's side: the runs as trials of Ray Tune
run_actor   the actor that executes runs, one after the other
progress    the number of runs that have ended, on standard error
"""
