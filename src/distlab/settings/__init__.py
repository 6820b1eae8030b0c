"""The flags of a run, read and checked before any process waits for another: one module for each kind of run.

Without torch, as `launch.sh` reads them too. May import all packages below `distlab.run`.
"""
