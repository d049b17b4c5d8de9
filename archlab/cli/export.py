"""A trained run as a folder that every tool of Transformers reads: `python -m archlab.export RUN FOLDER`.

It holds the weights as safetensors, config.json, generation_config.json, and for text a tokenizer with the run's ids.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from archlab.errors import guarded
from archlab.interop.folder import new_folder
from archlab.interop.hf import to_hf
from archlab.interop.tokenizer import to_tokenizer
from archlab.run.load import load_run


def export(run_dir: Path, folder: Path) -> str:
    """Write the folder; returns a sentence that says what it holds.

    Errors: UsageError where the run has not trained, `folder` exists, or no family of Transformers can express the run.
    """
    with new_folder(folder) as draft:
        lm, cfg, codec = load_run(run_dir)
        model = to_hf(lm)
        model.config.max_position_embeddings = cfg.data.context  # how far a client that asks may go
        model.save_pretrained(draft)
        if codec is not None:
            to_tokenizer(codec, cfg.data.context).save_pretrained(draft)
    held = f"{folder}: a model of the family {model.config.model_type} in {str(model.dtype).removeprefix('torch.')}"
    return f"{held}{'; it has no tokenizer, for the run has none' if codec is None else ' and its tokenizer'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="archlab.export", description="Write a trained run as a folder that Transformers loads."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("folder", type=Path, help="the folder to make")
    args = parser.parse_args(argv)
    return guarded(lambda: print(export(args.run, args.folder)))
