"""How Ray's processes on this machine start: forked from one that has imported torch, the engine and Ray.

A process that Ray starts by itself imports Ray twice and torch once, which takes two seconds of a processor, for the
driver and for each worker. `start_worker` is the program that Ray executes instead of its own one; it asks the fork
server (`serving`) for a process. `fork_server` is the fork server as the process of the user sees it.
"""
