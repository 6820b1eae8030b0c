"""The backend of torch.distributed: `dist.init_process_group("lab")`.

`lab_group` is the process group, `group` has what it can do beyond torch, `context` the state that the groups of a rank
share, `names` the names of messages, `pending` the operations under way, `waits` and `recorder` the deadlines and the
records. `transports` carries the tensors.

May import `distlab.machine`.
"""
