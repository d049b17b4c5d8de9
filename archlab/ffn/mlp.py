"""The feed-forward network of the first Transformers, with GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

from torch import Tensor, nn
from torch.nn.functional import gelu

from archlab.mixer import FFN, Aux


class MLP(FFN):
    """y = W_out gelu(W_up x). `d_ff` None means 4 d_model."""

    def __init__(self, d_model: int, *, d_ff: int | None = None):
        super().__init__()
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.up = nn.Linear(d_model, self.d_ff, bias=False)
        self.out = nn.Linear(self.d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Aux]:
        return self.out(gelu(self.up(x))), {}
