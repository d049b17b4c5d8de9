"""The README's plugin is executed as it stands there: two new files, and the contract suite finds it by itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def fenced(language: str, after: str) -> str:
    """The first fenced block of a language after a phrase of the README."""
    text = (ROOT / "README.md").read_text()
    text = text[text.index(after) :]
    return re.search(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.slow
def test_plugin_of_the_readme_passes_the_contract(tmp_path):
    for folder in ("archlab", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "archlab/attn/mean.py").write_text(fenced("python", "in `archlab/attn/mean.py`"))
    (tmp_path / "conf/attn/mean.yaml").write_text(fenced("yaml", "in `conf/attn/mean.yaml`"))
    suites = ["tests/testing/test_contract.py", "tests/measure/test_account.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites, "-k", "mean"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 17, done.stdout
