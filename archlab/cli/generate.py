"""`python -m archlab.generate RUN --prompt TEXT`: text from a run's checkpoint."""

import argparse
import os
import sys
from itertools import chain
from pathlib import Path

import torch

from archlab.config.device import resolve_device
from archlab.errors import UsageError, guarded
from archlab.run.generate import generate
from archlab.run.load import load_run
from archlab.train.checkpoint import CODEC_FILE_NAME


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for what cannot be asked, 1 for all else that fails."""
    args = _parser().parse_args(argv)
    return guarded(lambda: _stream(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="archlab.generate", description="Continue a text with a trained run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest that together have this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    return parser


def _stream(args: argparse.Namespace) -> None:
    """Write the prompt and its continuation to stdout as it comes."""
    device = resolve_device(args.device)
    model, _, codec = load_run(args.run, device=device)
    if codec is None:
        raise UsageError(
            f"{args.run} has no {CODEC_FILE_NAME}: it was trained on a task, or elsewhere with another tokenizer, "
            "not on text in bytes or characters; it continues no prompt"
        )
    prompt = torch.tensor([codec.encode(args.prompt)], dtype=torch.long, device=device)
    draws = torch.Generator(device).manual_seed(args.seed)
    tokens = generate(
        model,
        prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=draws,
    )
    sys.stdout.reconfigure(errors="replace")
    try:
        for text in chain([args.prompt], codec.stream(int(token) for token in tokens), ["\n"]):
            print(text, end="", flush=True)
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
