"""The lab's parallel library: one package for each role.

The docstring of each package states its purpose and the other packages that it may import; `lint-imports` checks this.
The layers, from the bottom up: `machine`; `comm`; `axes`; `collectives`, `parallel`, `pipeline`, `checkpoints` and
`rendezvous`; `reports`; `settings`; `run`; `tell`; `launching`; `exchange`. `distlab` imports `simplellm`, but none of
the packages beside it, such as `distlab_planner`. These import it; `subcommands` has their commands, and
`settings.optional_packages` the prediction of `--machine` and the page of `--page`, by name.

The modules next to the packages are commands (`python -m distlab.show_schedule`), except `registration`, which makes
`dist.init_process_group("lab")` known to torch, and `data_parallel`, which has the names that the exercises import.
"""

import os

from distlab.registration import register

# The time for which a rank's additional threads spin for more work: half a millisecond instead of ten, because other
# ranks may need the core. GNU's OpenMP, which PyTorch's wheels contain, reads this when it is loaded, so it has to be
# set before torch is imported. Ranks that are started one by one import torch first, and keep the ten.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

register()  # dist.init_process_group("lab")
