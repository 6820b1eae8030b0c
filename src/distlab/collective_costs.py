"""python -m distlab.collective_costs: the command is in `distlab_planner.collective_costs`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("distlab_planner.collective_costs", run_name="__main__", alter_sys=True)
