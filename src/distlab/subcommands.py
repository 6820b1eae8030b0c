"""The subcommands of `distlab` and `./launch.sh` that start no topology: a table of functions by their names.

The subcommands of the planner, the exercises and the page are in packages beside `distlab`, which works without them.
A module is imported only when one of its subcommands is requested.
"""

from collections.abc import Sequence

from distlab.run.commands import launcher
from distlab.settings.optional_packages import import_optional

# By heading, in the order in which they are listed. Each function is called with the arguments and the usage's program.
SUBCOMMANDS = {
    "for exercises": {
        "exercise": ("distlab_exercises.commands:exercise", "List the exercises, or write one: exercise NAME"),
        "hint": ("distlab_exercises.commands:hint", "A hint on an exercise, by default the first: hint NAME [NUMBER]"),
        "check": ("distlab_exercises.commands:check", "Compare a solved exercise with one process: check FILE"),
        "find": ("distlab_exercises.finding:find", "Check the fault that you have found in the museum: find FOLDER"),
        "answers": (
            "distlab_playground.answers:command",
            "Check the answers to the playground's lessons: answers FOLDER",
        ),
        "grade": ("distlab_exercises.commands:grade", "Check the exercises of all students of a course: grade FOLDER"),
    },
    "before a run": {
        "plan": ("distlab_planner.plan:command", "Predict which layout of a model is fastest on a machine."),
        "calibrate": ("distlab_planner.calibrate:command", "Measure this machine for the planner: calibrate FILE"),
        "playground": (
            "distlab_playground.command:command",
            "Play with schedules, collectives, layouts, in a browser.",
        ),
        "show-schedule": ("distlab.show_schedule:command", "Show a pipeline schedule: a table of ticks, its costs."),
        "collective-costs": ("distlab_planner.collective_costs:command", "Predict collectives between computers."),
        "tokenizer": ("simplellm.train_tokenizer:command", "Train a tokenizer on a text of yours."),
        "import": ("distlab.exchange.import_hf:command", "Make a Hugging Face Llama a run to resume: import DIR OUT"),
    },
    "after a run": {
        "tell": ("distlab.tell:command", "Let a run's model tell a story: tell RUN"),
        "compare": ("distlab_compare.command:command", "Find where two runs diverge: compare RUN_A RUN_B"),
        "page": ("distlab_page.command:command", "Write a run as a page, an HTML file: page RUN [OTHER RUN]"),
        "figures": ("distlab_figures.command:command", "Draw a figure of runs, such as their losses."),
        "export": ("distlab.exchange.export:command", "Write a run's model for Hugging Face: export RUN DIR"),
    },
}
FUNCTIONS = {name: function for group in SUBCOMMANDS.values() for name, (function, _) in group.items()}


def run_subcommand(name: str, args: Sequence[str]) -> int:
    """Run a subcommand, and return its exit status.

    Raises:
        InputError: the arguments cannot work, or its package is not installed.
    """
    module, _, function = FUNCTIONS[name].partition(":")
    return getattr(import_optional(module, name), function)(args, f"{launcher()} {name}") or 0
