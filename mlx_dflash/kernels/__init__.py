"""Metal kernels for the few query rows of a block, each with a twin in stock MLX operations.

choice.py decides once for each shape which of the two runs. Nothing is compiled or checked until it is needed.
"""

from .attention import Keys, Sight
from .choice import Kernels
from .matmul import Quantized

__all__ = ["Kernels", "Keys", "Quantized", "Sight"]
