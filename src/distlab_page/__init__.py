"""A page for a run: one HTML file, made from the run's records alone, that needs no network.

`records` reads a run's folder. `contents` computes what the page shows, with a module for each of its larger parts:
`passes` (a run's trace), `beside_plans` (bytes and seconds beside the planner's, which `planned` asks for), `ends`,
`verdict` (on two runs). `writing` puts all of it into `page.html`, with the parts of plotly's script that
`drawing_library` selects. `command` is `./launch.sh page`, also with `--serve`.

May import `distlab`, `distlab_planner` and `simplellm`; none of them imports it. It does not import torch.
"""

from distlab_page.writing import write
