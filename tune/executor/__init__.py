"""Many runs at once, for searches and studies: one executor, on Ray Tune, of whatever a source hands out.

spec        what the executor is given and what it passes on
executor    connects to Ray, and says how many runs fit
trials      the runs as trials of Ray Tune, on the driver's side
worker      the process that executes runs, one after the other
progress    how many are done, on standard error
"""
