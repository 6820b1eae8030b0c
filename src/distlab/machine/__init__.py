"""The machine that a rank runs on: its devices, cores, memory and processes, and torch where it has to be patched.

Imports none of the other packages of `distlab`.
"""
