"""The backend of torch.distributed: `dist.init_process_group("lab")`.

`group` is the process group, `context` the state that a rank's groups share, `names` the names of messages, `pending`
the operations under way, `waits` and `recorder` the deadlines and the records. `transports` carries the tensors.

May import `distlab.machine`.
"""
