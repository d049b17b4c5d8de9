"""What all tests share."""

import pytest
import torch
from commands import Commands
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig


@pytest.fixture(autouse=True)
def _clean_slate():
    """No test inherits another's random state or Hydra application, and small work is not split over threads."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.fixture
def archlab(capsys, monkeypatch, tmp_path):
    """The command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Commands(capsys)
