"""The records of a run: what its ranks did, sent and held, as its page has it."""

import marimo

app = marimo.App(width="medium", app_title="A run's records")

with app.setup:
    import html
    from pathlib import Path

    import marimo as mo

    from distlab_page.contents import contents
    from distlab_page.records import read
    from distlab_playground import runs
    from distlab_playground.guesses import ask
    from simplellm.errors import InputError

    HINT = (
        "first make a run, such as `./launch.sh hybrid --steps 20 --dmodel 96 --num-heads 4 --seq-len 64 --data sample`"
    )


@app.cell
def _():
    _known = runs.known(Path("runs"))
    folder = mo.ui.dropdown(_known, value=_known[0] if _known else None, label="run")
    mo.vstack([mo.md("# A run's records"), folder if _known else mo.callout(mo.md(HINT), kind="warn")])
    return (folder,)


@app.cell
def _(folder):
    mo.stop(folder.value is None)
    try:
        page = contents(read(Path(folder.value)))
    except InputError as error:
        mo.stop(True, mo.callout(mo.md(f"The library says: {error}"), kind="warn"))
    return (page,)


@app.cell
def _(page):
    page  # another run is another question
    locked, lock = mo.state(None, allow_self_loops=True)
    return lock, locked


@app.cell
def _(lock, locked, page):
    spent, title = page["time"], html.escape(page["title"])
    question = ask(
        f"{title}. For what percentage of their time did the ranks **not** compute?"
        if spent
        else f"{title}. This run has no account of its time yet. How many steps did it take?",
        None,
        locked,
        lock,
    )
    question
    return question, spent


@app.cell
def _(locked, page, spent):
    mo.stop(locked() is None)
    answer = runs.not_computing(spent) if spent else None
    said = f"They did not compute in {answer:.0%} of the time. " if spent else ""
    mo.vstack([mo.md(f"{said}{html.escape(page['status']['text'])}"), *([mo.Html(runs.time(spent))] if spent else [])])
    return


@app.cell
def _(locked, page):
    mo.stop(locked() is None)
    mo.vstack(
        [
            mo.md(
                "## All numbers\n\nThe same as on the run's page, `./launch.sh page`, which also draws its timeline."
            ),
            mo.accordion({each["caption"]: mo.Html(runs.table(each)) for each in runs.tables(page)}, multiple=True),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
