"""A run's folder from a checkpoint of Transformers: `python -m archlab.interop.hf import FOLDER RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from archlab.config.compose import load
from archlab.data import Codec
from archlab.data.codec import CharCodec
from archlab.errors import UsageError
from archlab.interop.folder import new_folder
from archlab.interop.hf import configuration, from_hf
from archlab.interop.tokenizer import to_codec
from archlab.train import checkpoint


def import_run(folder: Path, run_dir: Path) -> str:
    """Write a run's folder of the model in `folder`; returns a sentence that says what it holds.

    The weights are those of `folder`, in float32 where they are narrower. The run has trained on nothing: its data is
    a text that is yet to be named.

    Errors: UsageError where `folder` holds no model that archlab can express, or `run_dir` exists.
    """
    with new_folder(run_dir) as draft:
        model, codec = _read(folder)
        lm = from_hf(model)
        OmegaConf.save(_configuration(model, codec), draft / checkpoint.CONFIG_FILE_NAME)
        meta = {"vocab_size": lm.vocab_size, "progress": 1.0, "step": 0}
        no_moments = torch.optim.SGD(lm.parameters())
        checkpoint.save(draft / checkpoint.FILE_NAME, lm, no_moments, meta)
        if codec is not None:
            (draft / checkpoint.CODEC_FILE_NAME).write_text(codec.to_json(), encoding="utf-8")
    missing = "; it continues no text, for the tokenizer there is not one of bytes or characters such as archlab's"
    return f"{run_dir}: a run with the {model.config.model_type} model of {folder}{missing if codec is None else ''}"


def _read(folder: Path):
    """The model and the codec of its tokenizer, without anything from outside and without running its code."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"no model at {folder}: give a local folder of Transformers, with its config.json")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UsageError("Transformers is not installed: pip install 'archlab[hf]'") from error
    try:
        configuration(AutoConfig.from_pretrained(folder, local_files_only=True))  # refused before the weights are read
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype="auto", output_loading_info=True
        )
        model, found = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be read as a model: {' '.join(str(error).split())}") from error
    for name in sorted(found["missing_keys"]):  # which the library would leave at random
        raise UsageError(f"{folder} lacks the weight {name!r}: it is not the model that its config.json describes")
    try:
        codec = to_codec(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError):  # it has none
        codec = None
    return model.to(torch.promote_types(model.dtype, torch.float32)), codec


def _configuration(model, codec: Codec | None) -> DictConfig:
    """The one that archlab has without being told anything, with this model in it."""
    tokens = "characters" if isinstance(codec, CharCodec) else "bytes"
    cfg = load(["data=text", f"data.tokens={tokens}", f"dtype={str(model.dtype).removeprefix('torch.')}"])
    cfg.data.context = min(cfg.data.context, getattr(model.config, "max_position_embeddings", cfg.data.context))
    OmegaConf.set_struct(cfg, False)
    for node, settings in configuration(model.config).items():
        cfg[node] = settings
    return cfg
