"""One file a family. Where several can express a model, the first does."""

from archlab.interop.families.deepseek_v2 import DEEPSEEK_V2
from archlab.interop.families.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V3_DENSE
from archlab.interop.families.kimi_linear import KIMI_LINEAR, KIMI_LINEAR_DENSE
from archlab.interop.families.llama import LLAMA
from archlab.interop.families.minimax_m3 import MINIMAX_M3, MINIMAX_M3_DENSE
from archlab.interop.families.mistral import MISTRAL
from archlab.interop.families.mixtral import MIXTRAL
from archlab.interop.families.qwen3 import QWEN3
from archlab.interop.families.qwen3_moe import QWEN3_MOE
from archlab.interop.families.qwen3_next import QWEN3_NEXT

FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    DEEPSEEK_V3_DENSE,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    KIMI_LINEAR_DENSE,
    KIMI_LINEAR,
    MINIMAX_M3_DENSE,
    MINIMAX_M3,
    QWEN3_NEXT,
)
