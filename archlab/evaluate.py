"""Quality on a held-out split. Auxiliary losses never enter a reported figure. `python -m archlab.evaluate --help`.

Shapes: b sequences, t tokens, v vocabulary.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from archlab.checkpoint import load_run
from archlab.data import IGNORE, Codec, Dataset, build_dataset
from archlab.data.codec import ByteCodec
from archlab.errors import UsageError, guarded
from archlab.model import LM
from archlab.precision import autocast, resolve_device, resolve_dtype, widest_dtype


@torch.no_grad()
def evaluate(
    model: LM, dataset: Dataset, split: str, *, batch_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """`quality/<split>_loss`: cross-entropy in nats, averaged over the targets that are not ignored, whatever the
    batch size. For text `quality/<split>_bits_per_byte`, over the bytes of those targets; for a task
    `quality/<split>_accuracy`, the share of those targets that have the highest logit.
    """
    token_bytes = None
    if dataset.codec is not None:
        token_bytes = torch.from_numpy(dataset.codec.token_bytes).to(device)
    total = torch.zeros(4, dtype=widest_dtype(device), device=device)  # nats, targets, hits, bytes
    with eval_mode(model), autocast(device, dtype):
        for inputs, targets in dataset.eval_batches(split, batch_size):
            total += _sums(model(inputs.to(device))[0], targets.to(device), token_bytes).to(total.dtype)
    nats, n, hits, n_bytes = total.tolist()
    values = {f"quality/{split}_loss": nats / n}
    if token_bytes is None:
        values[f"quality/{split}_accuracy"] = hits / n
    else:
        values[f"quality/{split}_bits_per_byte"] = nats / math.log(2) / n_bytes
    return values


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each target (b t), in float32 or wider; 0 where ignored."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets)


def _sums(logits: Tensor, targets: Tensor, token_bytes: Tensor | None) -> Tensor:
    counted = targets != IGNORE
    nats = token_losses(logits, targets).to(widest_dtype(logits.device)).sum()
    hits = ((logits.argmax(dim=-1) == targets) & counted).sum()
    n_bytes = counted.sum() if token_bytes is None else (token_bytes[targets.clamp(min=0)] * counted).sum()
    return torch.stack([nats, counted.sum(), hits, n_bytes])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; afterwards every module is in the mode that it was in."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


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


if __name__ == "__main__":
    sys.exit(main())
