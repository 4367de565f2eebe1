"""Metal kernels for the few query rows of a block, each with a twin in stock MLX operations.

choice.py decides, once per shape, which of the two runs; nothing here is compiled or checked before it is first needed.
"""

from .attention import Keys, Sight
from .choice import Kernels
from .matmul import Quantized

__all__ = ["Kernels", "Keys", "Quantized", "Sight"]
