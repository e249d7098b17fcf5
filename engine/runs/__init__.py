"""A run from its launch to its result. Here all rooms meet.

prepare           makes a run of an experiment, after all checks that need no data
launch            runs the rounds of a run on a backend, and tells observers
rounds            an iterator over the rounds of a run while it runs; detached: a run that outlives its launcher
host              a run in this process: its data, plan, driver and pool
members           several runs in one process, which run their phases together; shared_data: what else they share
built_conflicts   what does not go together and is known only when the parts are built
expected_columns  the columns that a record will have, found by one small round
run_directory     writes the folder of a run; saved_files reads it, and tells it from other folders
fork, restore     a new run from a round of another one (fork_states: with its states); a run from its copies
client_states     the models of the clients of a finished run, from the states that it has kept
observer, result  who watches a run, and what it ends with; evaluation and chart are functions of a result
"""
