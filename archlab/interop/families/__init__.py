"""One file a family. Where several can express a model, the first does."""

from archlab.interop.families.llama import LLAMA

FAMILIES = (LLAMA,)
