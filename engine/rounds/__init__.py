"""The driver, which makes the updates of a run, and what lies between it and the pools that run its tasks.

The driver is a generator: it yields the phases of training and evaluation, and is sent their results by whoever plays
it. Passes over messages and losses that a sampler asks for are run at once.

driver      the loop over the updates: plan, results, stage, the server's step, commit, evaluation, checkpoint
training    makes the phases of a run; how the results of a synchronous round come about, in one phase
stream      how those of an asynchronous run do: jobs from several versions of the model run as soon as they can
pool        what a pool and a phase are, what may become of a task, and how a driver is played on a pool
resuming    whether a run can go on from a checkpoint
under_way   a run between two rounds: its model, the way to end it early, and what it ends with
retry       runs a phase on a pool, and repeats the tasks that fail
divergence  ends a run whose model is not finite or has become far too large
"""
