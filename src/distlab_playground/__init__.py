"""The playground: what the notebooks in `notebooks/` ask and draw, and the lessons whose answers are handed in.

`command` starts the notebooks. `guesses` asks before they show, `playback` plays; `schedules`, `layouts` and `runs`
turn answers of the library into words and numbers, and `drawing` draws them. `lessons` runs commands and reads their
records, `classroom` has the parts of a lesson's notebook, `answers` checks what a class hands in.

May import all other packages of the lab; none of them imports it. Only the notebooks, `guesses`, `playback` and
`classroom` need marimo.
"""
