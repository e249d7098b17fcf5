"""What the engine asks of a workload: a model that can be trained, and rows for every client.

model   the network fits into memory and is trained as torch would, and a model that the caller gives has its tensors
layers  the tensors of a model that settings name: its head, its normalisation layers and the like
split   the data and the rows of every client, without those that clients hold out
"""
