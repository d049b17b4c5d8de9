"""Sources of tokens: one file a source."""

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from archlab.data.base import IGNORE, Dataset
from archlab.data.codec import Codec
from archlab.plugins import check_keys

__all__ = ["IGNORE", "Codec", "Dataset", "build_dataset"]


def build_dataset(cfg: DictConfig) -> Dataset:
    """The source that `cfg` (the config group `data`) describes. Errors: UsageError for an unknown key or bad data."""
    check_keys("data", cfg)
    settings = OmegaConf.to_container(cfg, resolve=True)
    return get_object(settings.pop("_target_"))(**settings)
