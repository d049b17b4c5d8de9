"""SwiGLU feed-forward network (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn

from archlab.mixer import FFN, Aux
from archlab.nn.glu import glu


def swiglu_width(d_model: int) -> int:
    """8/3 d_model, rounded up to a multiple of 32: as many weights as a two-matrix network of 4 d_model."""
    return -(-8 * d_model // (3 * 32)) * 32


class SwiGLU(FFN):
    """y = W_out (silu(W_gate x) * W_up x). `d_ff` None means 8/3 d_model; `limit` that of the clamped form (`glu`)."""

    def __init__(self, d_model: int, *, d_ff: int | None = None, limit: float | None = None):
        super().__init__()
        self.limit = limit
        self.d_ff = swiglu_width(d_model) if d_ff is None else d_ff
        self.gate_up = nn.Linear(d_model, 2 * self.d_ff, bias=False)
        self.out = nn.Linear(self.d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Aux]:
        return self.out(glu(*self.gate_up(x).chunk(2, dim=-1), self.limit)), {}

    def matrices(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name != "gate_up.weight":
            return super().matrices(name, tensor)
        return dict(zip(("W_gate", "W_up"), tensor.chunk(2), strict=True))
