"""The playground: what there is."""

import marimo

app = marimo.App(app_title="The playground")

with app.setup:
    import ast

    import marimo as mo

    from distlab_playground.command import notebooks


@app.cell
def _():
    def links(lessons):
        for path, file in notebooks():
            if path != "/" and path.startswith("/lessons/") == lessons:
                name, _, about = ast.get_docstring(ast.parse(file.read_text())).partition(":")
                yield f"- [{name}](.{path}/):{about}"

    mo.md(
        "# The playground\n\nEach page asks first: lock a guess, and it shows what the library says. Begin with "
        "[pipeline schedules](./schedules/): what is a bubble, and which schedule has none?\n\n"
        + "\n".join(links(lessons=False))
        + "\n\n## Lessons\n\nPredict some numbers; the real commands run, some seconds each; compare.\n\n"
        + "\n".join(links(lessons=True))
        + "\n\nThe pages are plain Python files in `notebooks/`. The tab key and the arrow keys reach all controls."
    )
    return


if __name__ == "__main__":
    app.run()
