"""What a run leaves to be read: numbers of rounds and of clients, events, and where it comes from.

history         the records of all rounds so far, in columns: a record is column name -> number
parquet         the same as rounds.parquet, and what each column means: the place to look for a column
                (times are added up in reduction/tree.py)
metrics         which of two values of a metric is better, and whether a run ends early by one
best_model      the best model of a run so far, and its file
per_client      what each client did in a round (tracking.clients)
client_models   what clients' own models reach, in clients.parquet
event_log       lines for the log, kept until another thread has read them
partition_file  which client has which rows; heterogeneity: how different the clients are
lineage         which run a fork is a fork of
"""
