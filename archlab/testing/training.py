"""Every parameter learns from its own loss, by the right gradient, also where values are extreme."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from archlab.measure.equivalence import full
from archlab.measure.held import changed, fingerprint
from archlab.model import LM
from archlab.testing.variant import LENGTH, Variant, close, tokens


def check_gradients(variant: Variant) -> None:
    """Every parameter learns from the loss that should train it. A plugin's `aux_only` names the parameters that learn
    from one auxiliary loss alone; the language-model loss never reaches those, nor that auxiliary loss any other."""
    model = variant.build().train()
    aux_only = {
        f"{path}.{name}": aux
        for path, module in model.named_modules()
        for prefix, aux in getattr(module, "aux_only", {}).items()
        for name, _ in module.named_parameters()
        if name.split(".")[0] == prefix
    }
    for progress in (0.0, 1.0):
        model.after_step(progress)
        x = tokens(3, LENGTH + 1)
        logits, aux = model(x[:, :-1])
        _expect_gradients(model, cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), "lm", aux_only)
        for name in set(aux_only.values()):
            assert name in aux, f"parameters wait for the auxiliary loss {name!r}, but there is only {sorted(aux)}"
            _expect_gradients(model, aux[name], name, aux_only)


def _expect_gradients(model: LM, loss: Tensor, name: str, aux_only: dict[str, str]) -> None:
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    for (path, _), grad in zip(parameters.items(), grads, strict=True):
        reached = grad is not None and bool(grad.abs().max() > 0)
        assert grad is None or grad.isfinite().all(), f"the gradient of {path} from the {name} loss is not finite"
        assert reached == (aux_only.get(path, "lm") == name), (
            f"{path} gets {'a' if reached else 'no'} gradient from the {name} loss"
        )


def check_gradient_values(variant: Variant) -> None:
    """The gradient of the language-model loss is that of the loss: along a random direction of each parameter it is the
    central difference. Chosen blocks and experts are the same on both sides of so small a step."""
    model = variant.build().train()
    model.after_step(1.0)
    x = tokens(2, LENGTH + 1)

    def loss() -> Tensor:
        return cross_entropy(model(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())

    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        direction, step = torch.randn_like(parameter), 1e-7
        with torch.no_grad():
            ahead, behind = (_shifted(loss, parameter, sign * step * direction) for sign in (1, -1))
        slope = 0.0 if grad is None else (grad * direction).sum().item()
        difference = (ahead - behind) / (2 * step)
        scale = 1e-3 if grad is None else 1e-3 + grad.norm().item()
        assert abs(slope - difference) <= 1e-5 * scale, f"{name}: gradient {slope:.8g}, difference {difference:.8g}"


def _shifted(loss: Callable[[], Tensor], parameter: nn.Parameter, shift: Tensor) -> float:
    """The loss with a parameter moved by `shift`; it is put back."""
    kept = parameter.clone()
    parameter.add_(shift)
    value = loss().item()
    parameter.copy_(kept)
    return value


def check_auxiliary_losses(variant: Variant) -> None:
    """Auxiliary losses are finite scalars with a gradient in training, and none are computed in evaluation."""
    model = variant.build()
    x = tokens(2, LENGTH)
    assert model(x)[1] == {}, "an auxiliary loss was computed in evaluation mode"
    for name, value in model.train()(x)[1].items():
        assert value.dim() == 0, f"{name} is not a scalar"
        assert value.isfinite(), f"{name} is {value.item()}"
        assert value.requires_grad, f"{name} trains nothing"


def check_training_forward(variant: Variant) -> None:
    """Training and evaluation compute the same logits, whichever schedule the plugin has reached by the end."""
    model = variant.build()
    x = tokens(2, LENGTH)
    model.after_step(1.0)
    expected = full(model, x)
    close(model.train()(x)[0].detach(), expected, "training forward")


def check_after_step(variant: Variant) -> None:
    """`after_step` without a training forward since the last one changes nothing but what progress decides."""
    model = variant.build().train()
    model(tokens(2, LENGTH))
    model.after_step(0.5)
    before = fingerprint(model)
    model.after_step(0.5)
    found = changed(before, fingerprint(model))
    assert not found, f"a second after_step changed {found}"
    assert all(isinstance(v, float) for v in model.metrics().values()), "metrics must be floats"


def check_extremes(variant: Variant) -> None:
    """Large weights, and gates at strong decay, leave outputs and gradients finite in float32 and bf16."""
    for dtype, gain in ((torch.float32, 1.0), (torch.float32, 30.0), (torch.bfloat16, 30.0)):
        model = variant.build(torch.float32).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("dt_bias"):
                    parameter.add_(gain)  # a log-decay of -gain * exp(A_log) a token
                elif "mixer." in name and parameter.dim() == 2:
                    parameter.mul_(gain**0.5)
        x = tokens(2, 3 * LENGTH + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits, aux = model(x[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten()) + sum(aux.values())
        loss.backward()
        assert logits.isfinite().all(), f"logits at gain {gain:g} in {dtype} are not finite"
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        assert not bad, f"gradients at gain {gain:g} in {dtype} are not finite: {bad}"
