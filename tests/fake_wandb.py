"""A stand-in for a run of Weights & Biases."""

from types import SimpleNamespace


class FakeRun:
    """What a W&B run is told. `failing` names the calls that raise."""

    def __init__(self, failing=()):
        self.failing, self.axes, self.rows, self.record, self.exit_codes = failing, {}, [], {}, []
        self.summary = SimpleNamespace(update=self.update)

    def define_metric(self, name, step_metric=None, hidden=None):
        self.axes[name] = step_metric

    def log(self, values):  # a `step` would advance W&B's own counter, which drops rows that come late
        self._fail("log")
        self.rows.append(values)

    def update(self, record):
        self._fail("summary")
        self.record |= record

    def finish(self, exit_code):
        self.exit_codes.append(exit_code)
        self._fail("finish")

    def _fail(self, name):
        if name in self.failing:
            raise ConnectionError(f"{name}: the server is gone")
