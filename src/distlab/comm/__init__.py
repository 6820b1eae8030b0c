"""The backend of torch.distributed, `dist.init_process_group("lab")`, and where ranks are: devices, axes, placements.

`group` is the process group, `context` what a rank's groups share, `names` the names of what travels, `pending` what is
under way, `waits` and `recorder` the deadlines and the records. `shared`, `queues` and `hosts` carry tensors in memory,
over `mappings` and `signals`.

Imports none of the other packages of `distlab`.
"""
