"""The transports of a group's tensors, which `distlab.comm.lab_group` asks in turn."""
