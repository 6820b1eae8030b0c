"""plotly's script, with the parts that a page draws with.

The package plotly has one script for all kinds of figures, 4.8 MB; a browser takes half a second to read it. A page has
bars, lines and heatmaps: a fourth of the script. It is a bundle by esbuild, a sequence of modules `name=wrap((exports,
module)=>{...})`, which other modules run by `name()`. The modules that none of the needed ones runs are left out.
"""

import functools
import re
from collections.abc import Iterable
from itertools import pairwise

FIGURES = "bar", "heatmap"  # and "scatter", which is part of plotly's core
# The functions that wrap modules, by what they do: run a module once, and keep its exports or nothing.
WRAPPERS = (
    re.compile(r"([\w$]+)=\(([\w$]+),([\w$]+)\)=>\(\)=>[({](?:try\{return )?\3\|\|\2\(\(\3=\{exports:"),
    re.compile(r"([\w$]+)=\(([\w$]+),([\w$]+)(?:,[\w$]+)?\)=>\(\)=>[^;]{0,20};?(?:try\{return )?\(?\2&&\(\3=\2\("),
)
REGISTERED = re.compile(r"\.register\(\[((?:[\w$]+\(\),?){9,})\]\)")  # the kinds of figures
NAME = re.compile(r"[ ,]([\w$]+)$")  # "var name", or another one of the same "var"
RUN = re.compile(r"(?<![\w$.])([\w$]+)\(\)")
SAME_AS = re.compile(r"\.exports=([\w$]+)\(\)\}\)$")
KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')
TEXT = re.compile(r"\{(?:\"use strict\";)?[\w$]+\.exports='(?:[^'\\]|\\.)*'\}\)")  # a module that is a text


@functools.cache
def script() -> str:
    """Return the script."""
    from plotly.offline import get_plotlyjs

    return needed_parts(get_plotlyjs())


def needed_parts(plotly: str) -> str:
    """Return the parts of plotly's script that draw `FIGURES`; the whole script, if it is built in a different way."""
    wrappers, registered = [found[1] for one in WRAPPERS if (found := one.search(plotly))], REGISTERED.search(plotly)
    if len(wrappers) < len(WRAPPERS) or registered is None:
        return plotly
    places = _modules(plotly, wrappers)
    kinds = {_kind(plotly, places, name): name for name in RUN.findall(registered[1])}
    if not kinds.keys() >= {*FIGURES}:
        return plotly
    few = ",".join(f"{kinds[kind]}()" for kind in FIGURES)
    outside, at = list[str](), 0
    for start, end in places.values():
        outside.append(plotly[at:start])
        at = end
    outside.append(plotly[at:])
    bodies = {name: plotly[start:end].replace(registered[1], few) for name, (start, end) in places.items()}
    runs, todo = set[str](), RUN.findall("".join(outside))
    while todo:
        name = todo.pop()
        if name in bodies and name not in runs:
            runs.add(name)
            todo += RUN.findall(bodies[name])
    kept = (body if name in runs else "0" for name, body in bodies.items())
    return "".join(part for pair in zip(outside, kept, strict=False) for part in pair) + outside[-1]


def _modules(plotly: str, wrappers: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return where the modules are, by name, in order; without those whose ends are not certain."""
    wrap = "|".join(map(re.escape, wrappers))
    begun = [one.span() for one in re.finditer(rf"=(?:{wrap})\((?:\([\w$,]*\)|[\w$]+)=>(?=\{{)", plotly)]
    places, is_certain = dict[str, tuple[int, int]](), True
    for (equals, opens), (limit, _) in pairwise([*begun, (len(plotly), 0)]):
        name, end = NAME.search(plotly[equals - 20 : equals]), _end_of(plotly, opens, limit)
        if name and end is not None and is_certain:
            places[name[1]] = equals + 1, end
        is_certain = end is not None  # else the next one may be a part of this one
    return places


def _end_of(plotly: str, begin: int, limit: int) -> int | None:
    """Return the end of a module, where as many braces are closed as are opened; None if braces in texts hide it."""
    if text := TEXT.match(plotly, begin, limit):
        return text.end()
    depth, at = 0, begin
    while (close := plotly.find("})", at, limit)) >= 0:
        depth += plotly.count("{", at, close) - plotly.count("}", at, close + 1)
        at = close + 1
        if not depth:
            return close + 2 if plotly[close + 2] in ",;" else None
    return None


def _kind(plotly: str, places: dict[str, tuple[int, int]], name: str) -> str | None:
    """Return the kind of figures that a registered module draws."""
    while name in places:
        body = plotly[slice(*places[name])]
        if kind := KIND.search(body):
            return kind[1]
        same = SAME_AS.search(body)
        name = same[1] if same else ""
    return None
