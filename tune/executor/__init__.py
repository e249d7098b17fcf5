"""The executors of many runs, which searches and studies share: processes that runs share, or Ray Tune.

source         the interfaces: what hands out runs, what executes them, what observes them, and what they exchange
executor       which executor runs get, and how many of them fit
requested_run  a run as its process executes it
processes      processes of this machine that several runs share; process_main: what such a process executes;
               fork_server: the process that they are forked from
ray_tune       runs as trials of Ray Tune, each in a process of its own
"""
