"""`python -m archlab.testing attn=NAME [ffn=NAME] [attn.KEY=VALUE ...]`: the contract suite on one plugin.

Each check is a row of a table: passed, or the first input that it failed on. The plugin may be of any package that
archlab finds. Exit status: 0 if all passed, 1 if one failed, 2 where there is no such plugin or setting.
"""

import sys
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from archlab.config.compose import configuration
from archlab.errors import ArchlabError, UsageError, guarded, sentence
from archlab.plugins import GROUPS
from archlab.testing import CHECKS, Variant


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _command(words))


def _command(words: list[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return
    variant, console = _variant(words), Console()
    findings = {check: _finding(check, variant) for check in track(CHECKS, "checking", console=console, transient=True)}
    name = " ".join([f"attn={variant.attn} ffn={variant.ffn}", *variant.overrides])
    console.print(name, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(_table(findings))
    failed = [check.__name__ for check, finding in findings.items() if finding]
    if failed:
        raise ArchlabError(f"{len(failed)} of {len(CHECKS)} checks failed: {', '.join(failed)}")


def _variant(words: list[str]) -> Variant:
    """What the words name, once a whole configuration with them is good. Errors: UsageError."""
    words = [word.lstrip("+") for word in words]
    for word in words:
        if word.partition("=")[0].split(".")[0] not in GROUPS or "=" not in word:
            raise UsageError(f"{word}: give attn=NAME, ffn=NAME and their settings alone")
    configuration(words)
    chosen = dict(word.split("=", 1) for word in words if word.partition("=")[0] in GROUPS)
    return Variant(**chosen, overrides=tuple(w for w in words if w.partition("=")[0] not in GROUPS))


def _finding(check: Callable[[Variant], None], variant: Variant) -> str:
    """The first thing that a check found wrong, or nothing."""
    try:
        check(variant)
    except AssertionError as error:
        return str(error).partition("\n")[0] or "failed without a word"
    except Exception as error:
        return sentence(error)
    return ""


def _table(findings: dict[Callable[[Variant], None], str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("check", no_wrap=True)
    table.add_column("result", overflow="fold")
    for check, finding in findings.items():
        result = Text(finding, style="red") if finding else Text("passed", style="green")
        table.add_row(check.__name__.removeprefix("check_").replace("_", " "), result)
    return table
