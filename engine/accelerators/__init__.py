"""What is particular to devices other than the processor. The driver stays on the processor; workers compute here.

choice    which device a run gets where the experiment leaves it open
transfer  copies that never make the processor wait more often than necessary
columns   where batches are gathered from: the whole training set on the device, the rows of a task, or each batch
memory    the memory that a worker may use beside other workers on the same card
settings  the settings of torch with which a run computes, and the caller's afterwards
faults    errors after which a process can do nothing more with its device
"""
