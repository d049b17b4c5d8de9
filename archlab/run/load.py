"""A run's trained model, from its folder."""

from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from archlab.data import Codec
from archlab.errors import UsageError
from archlab.model import LM, build_model
from archlab.train.checkpoint import CODEC_FILE_NAME, CONFIG_FILE_NAME, FILE_NAME, load


def load_run(run_dir: Path | str, *, device: torch.device | str = "cpu") -> tuple[LM, DictConfig, Codec | None]:
    """A run's trained model in eval mode, its configuration, and the codec of its text (None for a task).

    Errors: UsageError where the folder is not that of a run that has trained.
    """
    run_dir = Path(run_dir)
    config = run_dir / CONFIG_FILE_NAME
    if not config.is_file():
        raise UsageError(f"no run at {run_dir}: give a folder that a run has written, with its config.yaml")
    checkpoint = load(run_dir / FILE_NAME, prefix="model/")
    cfg = OmegaConf.load(config)
    model = build_model(cfg, checkpoint.meta["vocab_size"], device=device)
    model.to(checkpoint.tensors["model/embed.weight"].dtype)
    checkpoint.restore_model(model)
    model.eval().after_step(checkpoint.meta["progress"])
    codec = run_dir / CODEC_FILE_NAME
    return model, cfg, Codec.from_json(codec.read_text(encoding="utf-8")) if codec.is_file() else None
