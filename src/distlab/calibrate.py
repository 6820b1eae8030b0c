"""python -m distlab.calibrate: the command is in `distlab_planner.calibrate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("distlab_planner.calibrate", run_name="__main__", alter_sys=True)
