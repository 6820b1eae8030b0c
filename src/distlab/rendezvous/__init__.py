"""How ranks and machines find each other, agree, and tell each other why they end.

May import `distlab.comm`.
"""
