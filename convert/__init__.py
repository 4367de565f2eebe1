"""Weights from elsewhere to MLX folders: DFlash drafts from Hugging Face, GGUF targets; ordinary targets are mlx-lm's.

`python -m convert` in a checkout, `python -m mlx_dflash.convert` when installed: the same package under two names,
so inside it imports are relative. It knows file formats and names of tensors; it runs no model.
"""

from .draft import convert_draft, is_draft_config
from .gguf_target import convert_gguf

__all__ = ["convert_draft", "convert_gguf", "is_draft_config"]
