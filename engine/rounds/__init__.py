"""The driver, which makes the updates of a run, and what lies between it and the pools that run its tasks.

driver      the loop over the updates: plan, results, stage, the server's step, commit, evaluation, checkpoint
phases      has the pool run one phase after another, and logs what workers find in them
training    how the results of a synchronous round come about: the workers train all of its clients in one phase
stream      how those of an asynchronous run do: jobs from several versions of the model run as soon as they can
pool        what a pool and a phase are, and what may become of a task
retry       runs a phase, and repeats the tasks that fail
divergence  ends a run whose model is not finite or has become far too large
"""
