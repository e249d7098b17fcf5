"""What the engine needs to know of a method without knowing its name: the form of what it keeps and sends.

state_spec  the shapes of a method's states and messages; rows, bytes and the parsing of sums follow from them
numbers     a method's numbers, such as step sizes, apart from everything else: methods of one form differ only in them
scheduled   other numbers of a method's local rule in every local step
batch_norm  running statistics beside a method, which never sees them
personal    tensors of the model that stay with the client, beside a method, which never sees them
ranked      adapters of clients with different ranks, beside a method, which sees the largest one
"""
