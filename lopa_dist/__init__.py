"""lopa_dist: large-batch text generation with diffusion language models, by Lookahead Parallel Decoding.

from lopa_dist import LLM

problem = "Sam has 12 candles . Sam gives 6 away . Sam buys 12 more . How many candles does Sam have now ?"
for output in LLM("causal").generate([problem]):
    print(output.text, output.tokens_per_forward)
"""

import os
from typing import TYPE_CHECKING

from lopa_dist.imports import when_asked

if TYPE_CHECKING:
    from lopa_dist.decode.config import DecodeConfig
    from lopa_dist.llm import LLM, Output
    from lopa_dist.sampling_params import SamplingParams

__version__ = "0.1.0"
# gives a row the same bits in any batch on CPUs without AVX-512, too (`kernels.row_bits`); MKL reads it only once
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
__all__ = ["LLM", "DecodeConfig", "Output", "SamplingParams", "__version__"]

# torch comes with them, and the command line's help must not wait
__getattr__ = when_asked(
    __name__, {"DecodeConfig": "decode.config", "LLM": "llm", "Output": "llm", "SamplingParams": "sampling_params"}
)


def __dir__() -> list[str]:
    return __all__
