"""python -m distlab.plan: the command is in `distlab_planner.plan`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("distlab_planner.plan", run_name="__main__", alter_sys=True)
