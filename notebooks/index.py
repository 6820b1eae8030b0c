"""The playground: what there is."""

import marimo

app = marimo.App(app_title="The playground")

with app.setup:
    import ast

    import marimo as mo

    from distlab_playground.command import apps
    from distlab_playground.lessons import all_lessons


@app.cell
def _():
    def links():
        for path, file in apps():
            name, _, about = ast.get_docstring(ast.parse(file.read_text())).partition(":")
            if path not in ("/", "/lesson"):
                yield f"- [{name}](.{path}/):{about}"

    mo.md(
        "# The playground\n\nEach page asks first: lock a guess, and it shows what the library says. Begin with "
        "[pipeline schedules](./schedules/): what is a bubble, and which schedule has none?\n\n"
        + "\n".join(links())
        + "\n\n## Lessons\n\nPredict some numbers; the real commands run, some seconds each; compare.\n\n"
        + "\n".join(f"- [{each.title}](./lesson/?name={each.name})" for each in all_lessons())
        + "\n\nThe pages are plain Python files in `notebooks/`. The tab key and the arrow keys reach all controls."
    )
    return


if __name__ == "__main__":
    app.run()
