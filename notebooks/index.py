"""The playground: what there is."""

import marimo

app = marimo.App(app_title="The playground")

with app.setup:
    import ast

    import marimo as mo

    from distlab_playground.command import notebooks


@app.cell
def _():
    def link(path, file):
        name, _, about = ast.get_docstring(ast.parse(file.read_text())).partition(":")
        return f"- [{name}](.{path}/):{about}"

    pages = sorted((page for page in notebooks() if page[0] != "/"), key=lambda page: page[0].count("/"))
    mo.md(
        "# The playground\n\nEach page asks first: lock a guess, and it shows what the library says.\n\n"
        + "\n".join(link(*page) for page in pages)
        + "\n\nThe pages are plain Python files in `notebooks/`. The tab key and the arrow keys reach all controls."
    )
    return


if __name__ == "__main__":
    app.run()
