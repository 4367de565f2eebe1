"""Weights from elsewhere to MLX folders: DFlash drafts in every layout, GGUF targets; ordinary targets are mlx-lm's.

`python -m convert` in a checkout, `python -m mlx_dflash.convert` when installed: the same package under two names,
so inside it imports are relative. It knows file formats and names of tensors.
"""

from .draft import convert_draft
from .gguf_target import convert_gguf
from .target import convert_target

__all__ = ["convert_draft", "convert_gguf", "convert_target"]
