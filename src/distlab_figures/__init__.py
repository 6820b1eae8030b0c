"""The figures of the lab's pages, and of a user's runs: `distlab figures`.

`runs` draws figures from runs, `diagrams` those that need none.

May import `distlab` and `simplellm`.
"""
