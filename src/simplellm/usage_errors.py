"""A command line that is not valid, in a sentence."""

import re


def one_sentence(panel: str) -> str:
    """Return the text of tyro's panel as one sentence, without title and frame ("-" in a plain terminal)."""
    lines = [line.strip("│╭╮╰╯─ ") for line in panel.splitlines()]
    text = " ".join([line for line in lines if line.strip("-")][1:])
    text = re.split(r" ?(?:For full helptext|Argument helptext:)", text)[0]
    if missing := re.fullmatch(r"Missing from [^:]*: (.*) \(required\)", text):
        entries = [re.fullmatch(r"(--\S+ [A-Z]+|[\w|-]+) (.*)", each) for each in missing[1].split(" (required) ")]
        named = [f"{entry[1]} ({entry[2]})" for entry in entries if entry]
        if len(named) == len(entries):
            text = f"missing: {', '.join(named)}"
    if cannot := re.match(r"Error parsing (--\S+): Could not .*?arguments:? \[(.*?)\]", text):  # of several values
        flag, given = cannot[1], cannot[2].replace("'", "").replace(",", "")
        usage = next((line for line in lines if line.startswith(f"{flag} ")), flag)  # with the kinds of its values
        text = f"{flag} {given}: give it as {usage}"
    for of_python, plain in (
        (r"no type matching .* Got errors: .* - <class '\w+'>: ", ""),  # of a flag that may also be None
        (r"Missing value for argument '(.*)'\. Expected 1 values\.", r"\1: give a value"),
        (r"Missing value for argument '(.*)'\. Expected (\d+) values\.", r"\1: give \2 values"),
        (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number"),
        (r"could not convert string to float: (.*)", r"\1 is not a number"),
        (r"Error parsing RANK: (.*) is not a whole number", r"\1 is not the value of a flag, nor a rank"),
        (r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)\.", r"\2 \1: give one of \3"),
    ):
        text = re.sub(of_python, plain, text)
    text, _, similar = text.partition(" Perhaps you meant: ")  # flags, each with its metavar and its help
    if flags := re.findall(r"(--[\w-]+),? (?=[A-Z]{2}|[{|[]|--no-)", similar):
        text += f"; did you mean {' or '.join(flags)}?"
    return f"{text} (--help lists the flags)"
