"""`python -m archlab.evaluate RUN [data.KEY=VALUE ...]`: the quality of a run on its own data, or on other data."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from archlab.config.device import resolve_device, resolve_dtype
from archlab.data import Codec, Dataset, build_dataset
from archlab.data.codec import ByteCodec
from archlab.errors import UsageError, guarded
from archlab.run.load import load_run
from archlab.train.evaluate import evaluate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for what cannot be asked, 1 for all else that fails."""
    parser = argparse.ArgumentParser(
        prog="archlab.evaluate", description="Evaluate a run on its own data or on other data; prints a line of JSON."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("settings", nargs="*", metavar="data.KEY=VALUE", help="what is other than in the run")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="(default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args(argv)
    return guarded(lambda: print(json.dumps(_evaluate_run(args))))


def _evaluate_run(args: argparse.Namespace) -> dict[str, float]:
    device = resolve_device(args.device)
    model, cfg, codec = load_run(args.run, device=device)
    dataset = _dataset(cfg, codec, args.settings)
    if dataset.vocab_size > model.vocab_size:
        raise UsageError(f"data={dataset.name} has {dataset.vocab_size} token ids; the run has {model.vocab_size}")
    dtype = resolve_dtype(cfg.dtype, device)
    return evaluate(model, dataset, args.split, batch_size=cfg.train.batch_size, device=device, dtype=dtype)


def _dataset(cfg: DictConfig, codec: Codec | None, settings: Sequence[str]) -> Dataset:
    """The run's data with other settings. Errors: UsageError where its tokens would be others than the run's."""
    for setting in settings:
        if not setting.startswith("data.") or "=" not in setting:
            raise UsageError(f"{setting}: give settings of the data alone, as data.KEY=VALUE")
    dataset = build_dataset(OmegaConf.merge(cfg.data, OmegaConf.from_dotlist(list(settings)).get("data", {})))
    if (codec and codec.to_json()) != (dataset.codec and dataset.codec.to_json()):
        raise UsageError(
            f"the tokens of data={dataset.name} are {_kind(dataset.codec)}, which are not the {_kind(codec)} of the run"
        )
    return dataset


def _kind(codec: Codec | None) -> str:
    if codec is None:
        return "symbols of a task or of another tokenizer"
    return "bytes" if isinstance(codec, ByteCodec) else f"{codec.vocab_size} characters"
