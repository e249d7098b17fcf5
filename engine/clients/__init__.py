"""What a worker does for a client: it runs tasks, and knows neither Ray nor rounds.

worker             runs a task: the local training of some clients, a pass over messages, or a part of an evaluation
local_training     the local steps of a block of clients, under vmap or for a client alone
batches            how batches are drawn and gathered: the stream of mini-batches of each client
evaluation         metrics on the test set and over the clients' own rows
own_models         clients' own models on the clients' own rows, also after an adaptation
own_statistics     their running statistics, found on the clients' own training rows
own_columns        what the driver makes of it: how each metric is distributed over the clients
modules            modules in training and in evaluation, and the global generators, from which no run may draw
members            clients of several runs in one block: runs of one process that differ in numbers, seeds or data
"""
