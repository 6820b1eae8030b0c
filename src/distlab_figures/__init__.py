"""The figures of the lab's pages, and of a user's runs: `distlab figures`.

`runs` draws figures from runs, which `records` reads, `diagrams` those that need none; `command` lists them all.

May import `distlab` and `simplellm`.
"""
