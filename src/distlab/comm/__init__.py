"""Communication between ranks: devices, the rank grid, messages and collectives, and the record of all of them.

Imports none of the other packages of `distlab`.
"""
