"""The playground: what the notebooks in `notebooks/` ask and draw.

`command` starts the notebooks. `guesses` asks before they show; `schedules`, `layouts` and `runs` turn answers of the
library into words and numbers, and `drawing` draws them.

May import all other packages of the lab; none of them imports it. Only the notebooks and `guesses` need marimo.
"""
