"""Guesses: a question before they are locked, and the guess from then on."""

from distlab_playground.guesses import ask, missing


def test_a_guess_is_an_answer_to_each_question() -> None:
    assert missing(None) == missing({"guess": None}) == missing({"loss": 0, "bytes": None}) == "Give an answer first."
    assert missing({"guess": 0}) is missing({"loss": 0, "student": ""}) is None
    assert "Your guess, locked: " in ask("How many bytes?", None, lambda: 0, lambda _: None).text
