"""The transports of a group's tensors: shared memory, queues in it, several hosts, gloo and NCCL.

`distlab.comm.lab_group` asks them in turn, and imports them only for groups of more than one rank.
"""
