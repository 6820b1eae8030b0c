"""Parsers of command lines, kept: tyro makes one anew for each call, and tests and ranks call it by the thousand."""

from typing import Any

from tyro._parsers import ParserSpecification

MOST = 64
make = ParserSpecification.from_callable_or_type
kept: dict[tuple[Any, ...], ParserSpecification] = {}


def keep_parsers() -> None:
    """Have tyro make a parser for a class, its defaults and a description once."""
    ParserSpecification.from_callable_or_type = staticmethod(parser_of)  # type: ignore[method-assign, assignment]


def parser_of(settings: Any, **options: Any) -> ParserSpecification:
    if options["parent_classes"]:  # a part of another parser
        return make(settings, **options)
    key = settings, options["description"], repr(options["default_instance"])
    if key not in kept:
        kept[key] = make(settings, **options)
        if len(kept) > MOST:
            del kept[next(iter(kept))]
    return kept[key]
