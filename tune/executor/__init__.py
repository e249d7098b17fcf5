"""The executor of many runs, which searches and studies share: in processes that runs share, or on Ray Tune.

source         the interface of what hands out the runs, and what is exchanged with it
observed       a source that tells observers of its runs
executor       connects to Ray and computes how many runs fit
requested_run  a run as its process executes it
processes      processes of this machine that several runs share; process_main: what such a process executes
ray_tune       the driver's side on Ray: the runs as trials of Ray Tune
run_actor      the actor that executes runs, one after the other
"""
