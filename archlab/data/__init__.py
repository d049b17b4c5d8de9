"""Sources of tokens: one file a source."""

from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from archlab.data.base import IGNORE, Dataset
from archlab.data.codec import Codec
from archlab.plugins import check_keys

__all__ = ["IGNORE", "Codec", "Dataset", "build_dataset"]


def build_dataset(cfg: DictConfig) -> Dataset:
    """The source that `cfg` (the config group `data`) describes. Errors: UsageError for an unknown key or bad data."""
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    settings.pop("seed", None)  # of the order of the batches, which is the trainer's
    check_keys("data", OmegaConf.create(settings))
    return get_object(settings.pop("_target_"))(**settings)
