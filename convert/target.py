"""Ordinary targets: mlx-lm converts them; here the folder appears whole or not at all."""

from pathlib import Path

from mlx_dflash.files.folders import new_folder, refuse_existing

from .draft import Quantization


def convert_target(hf_path: str, mlx_path: str | Path, quantization: Quantization | None = None, **options) -> Path:
    """Convert a folder or repository with mlx_lm.convert into the new folder `mlx_path`, and return the folder.

    options: dtype, revision, dequantize, trust_remote_code, as mlx-lm has them. Raises what mlx-lm raises; then no
    folder is left.
    """
    from mlx_lm.convert import convert

    refuse_existing(mlx_path)
    bits, group_size, mode, recipe = quantization or Quantization()
    if recipe and group_size is None:
        group_size = 64  # mlx-lm's recipes do not know their default.
    with new_folder(mlx_path) as folder:
        inner = folder / "model"
        convert(
            hf_path,
            str(inner),
            quantize=quantization is not None,
            q_bits=bits,
            q_group_size=group_size,
            q_mode=mode,
            quant_predicate=recipe,
            **options,
        )
        if not any(inner.glob("*.safetensors")):
            raise ValueError(f"{hf_path} holds no weights that mlx-lm converts")
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()
    return Path(mlx_path)
