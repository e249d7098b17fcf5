"""What is decided and tried before round 1, on the run's own model and data.

execution_plan  how many clients are in a block, and which kernels they have, on processors and GPUs; see plan.json
autotune        measures how long a client takes with each plan, and which convolutions are quicker as products
kernel_proof    proves that other kernels compute what torch's compute
as_written      proves that what is computed are the gradients of the module as its user wrote it
trial_step      one step of the user's code, to find what breaks the rules of methods and workloads
data            the data of a run, after all checks that need it
"""
