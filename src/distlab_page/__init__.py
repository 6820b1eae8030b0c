"""A page for a run: one HTML file, made from the run's records alone, that needs no network.

`records` reads a run's folder, `contents` and `passes` compute what the page shows, `planned` asks the planner for what
should have been sent and held, `writing` puts all of it into `page.html`, `command` is `./launch.sh page`, also with
`--serve`.

May import `distlab`, `distlab_planner` and `simplellm`; none of them imports it. It does not import torch.
"""

from distlab_page.writing import write
