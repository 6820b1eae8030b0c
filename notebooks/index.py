"""The playground: what there is."""

import marimo

app = marimo.App(app_title="The playground")

with app.setup:
    import ast

    import marimo as mo

    from distlab_playground.command import notebooks


@app.cell
def _():
    def about(file):
        return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]

    links = [f"- [{path[1:]}](.{path}/): {about(file)}" for path, file in notebooks() if path != "/"]
    mo.md(
        "# The playground\n\nEach page asks first: lock a guess, and it shows what the library says.\n\n"
        + "\n".join(links)
        + "\n\nThe pages are plain Python files in `notebooks/`. The tab key and the arrow keys reach all controls."
    )
    return


if __name__ == "__main__":
    app.run()
