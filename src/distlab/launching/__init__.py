"""`./launch.sh`: this machine's ranks as processes, from their start to their end.

Several machines have a launcher each, which find each other (`nodes`).

May import all packages except `distlab.exchange`.
"""
