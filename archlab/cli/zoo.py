"""`python -m archlab.zoo [FILE ...] [--out DIR]`: published models, counted against what their authors state, and
any configuration of yours among them.

Nothing is run: each model is built without weights. A FILE is the `config.yaml` of a run, or a yaml file as in
`conf/zoo`, whose section `published` may state figures too.

Exit status: 0; 1 where a counted figure is not the published one and nothing explains it; 2 for a FILE that is no
configuration.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from archlab.errors import ArchlabError, guarded
from archlab.zoo import report
from archlab.zoo.compare import comparisons
from archlab.zoo.models import read, zoo


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m archlab.zoo", description=__doc__.partition("\n\n")[2])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="a configuration to stand among them")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"), help="where the files go; default: runs/zoo")
    args = parser.parse_args(argv)
    return guarded(lambda: _zoo(args.files, args.out))


def _zoo(files: Sequence[Path], out: Path) -> None:
    models = [*map(read, files), *zoo()]
    compared = [comparison for model in models for comparison in comparisons(model)]
    console = Console()
    report.show(models, compared, console)
    written = report.write(models, compared, out)
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)
    if faults := report.differing(models, compared):
        raise ArchlabError("; ".join(faults))
