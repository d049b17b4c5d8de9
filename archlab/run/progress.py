"""What a person sees of a run while it goes on: a line for each stage, a bar for the training."""

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from archlab.measure.units import human_count

PLAIN_LINE_EVERY_S = 10.0
"""Where there is no terminal, a line of progress is printed so often."""


class Reporter:
    """What a running job tells a person: stages as lines, training as a bar in a terminal, else as a line now and then.

    A cell of a sweep says no stages; a quiet one, of several side by side that would write over each other, nothing.
    `appendix` holds lines for the end, behind the card.
    """

    def __init__(self, console: Console, steps: int, *, stages: bool = True, quiet: bool = False):
        self.console, self.steps, self.stages, self.quiet = console, steps, stages, quiet
        self.appendix: list[str] = []
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=steps, figures="")
        self.first: tuple[int, float] | None = None
        self.said_at = -math.inf

    def stage(self, text: str) -> None:
        """Say what begins now."""
        self.bar.stop()
        if self.stages and not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """See `archlab.train.Progress`."""
        figures = f"loss {loss:.3f}, {human_count(tokens_per_second)} tokens/s"
        self.bar.start()
        self.bar.update(self.task, completed=step, figures=figures)
        now = time.perf_counter()
        self.first = self.first or (step, now)
        due = step == self.steps or now - self.said_at >= PLAIN_LINE_EVERY_S
        if self.quiet or self.console.is_terminal or not due:
            return
        self.said_at, done = now, step - self.first[0]
        left = f", {(now - self.first[1]) / done * (self.steps - step):.0f} s left" if done else ""
        self.console.print(f"step {step}/{self.steps}: {figures}{left}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()
