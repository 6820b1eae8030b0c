"""The backend of torch.distributed, `dist.init_process_group("lab")`; devices, axes and placements.

`group` is the process group, `context` the state that a rank's groups share, `names` the names of messages, `pending`
the operations under way, `waits` and `recorder` the deadlines and the records. `transports` carries the tensors.

Imports none of the other packages of `distlab`.
"""
