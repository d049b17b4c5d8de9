"""One optimizer step: a batch becomes a gradient, the gradient an update.

Shapes: b sequences, t tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from archlab.data import IGNORE
from archlab.errors import ArchlabError, UsageError
from archlab.mixer import Aux
from archlab.model import LM, eval_mode
from archlab.nn.precision import autocast, weight_dtype, widest_dtype
from archlab.train.evaluate import token_losses
from archlab.train.optimizer import build_optimizer
from archlab.train.settings import TrainSettings


class NotFinite(ArchlabError):
    """A loss or a gradient is no longer a number."""


class Stepper:
    """A model and its optimizer. It knows nothing of data, schedules, files."""

    def __init__(self, model: LM, settings: TrainSettings, *, device: torch.device, dtype: torch.dtype):
        self.model = model.to(device, weight_dtype(dtype)).train()
        self.settings, self.device, self.dtype = settings, device, dtype
        self.forward = _compiled(model) if settings.compile else model
        self.optimizer = build_optimizer(model, settings)

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> dict[str, float]:
        """Update the weights on a batch (b t). Returns its loss, its auxiliary losses and the norm of the gradient.

        Errors: NotFinite, before the weights take a step that would ruin them.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses = self._backward(inputs, targets)
        clip = math.inf if self.settings.clip is None else self.settings.clip
        losses["train/grad_norm"] = clip_grad_norm_(self.model.parameters(), clip)
        wide = widest_dtype(self.device)
        # The only transfer to the host in a step, and before the update.
        values = dict(zip(losses, torch.stack([v.to(wide) for v in losses.values()]).tolist(), strict=True))
        _require_finite(values["train/loss"] + values["train/grad_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return values

    def check(self, inputs: Tensor, targets: Tensor) -> None:
        """Errors: NotFinite where the weights as they are give a batch no finite loss."""
        n_rows = -(-len(inputs) // self.settings.accumulate)
        with torch.no_grad(), eval_mode(self.model):
            _require_finite(self._losses(self.model, inputs[:n_rows], targets[:n_rows])[0].item())

    def _backward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Add up the gradients of a batch (b t), piece by piece; returns its loss and auxiliary losses, detached.

        Every target of the batch weighs the same, in whichever piece it stands.
        """
        n_pieces, n_targets = self.settings.accumulate, max(1, int((targets != IGNORE).sum()))
        sums: dict[str, Tensor] = {}
        for x, y in zip(inputs.tensor_split(n_pieces), targets.tensor_split(n_pieces), strict=True):
            loss, aux = self._losses(self.forward, x, y)
            parts = {"train/loss": loss / n_targets} | {f"train/aux/{k}": v / n_pieces for k, v in aux.items()}
            torch.stack(list(parts.values())).sum().backward()
            for name, value in parts.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return sums

    def _losses(self, forward: Callable, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Aux]:
        """Cross-entropy summed over the targets of (b t) that count, and the auxiliary losses."""
        inputs, targets = self._to_device(inputs), self._to_device(targets)
        with autocast(self.device, self.dtype):
            logits, aux = forward(inputs)
        return token_losses(logits, targets).sum(), aux

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def _require_finite(value: float) -> None:
    if not math.isfinite(value):
        raise NotFinite(f"the loss or its gradient is {value}")


def _compiled(model: LM) -> Callable:
    """The compiled forward pass. Errors: UsageError where compiling fails, in its first call."""
    from torch._dynamo.exc import TorchDynamoException  # a second to import, for those who compile

    forward = torch.compile(model)

    def call(tokens: Tensor) -> tuple[Tensor, Aux]:
        try:
            return forward(tokens)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise UsageError(f"train.compile=true does not work here ({reason}): give train.compile=false") from error

    return call
