"""The transports of a group's tensors: shared memory, queues in it, several hosts, gloo and NCCL.

`distlab.comm.group` asks them in turn, and imports them only for groups of more than one rank.
"""
