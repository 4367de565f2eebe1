"""GGUF target -> MLX folder that plain mlx_lm.load loads, its quantization kept bit for bit.

Puts together what gguf_models and gguf_tokenizer read; runs no model.
"""

from pathlib import Path

from tqdm import tqdm

from mlx_dflash.files.card import weights_in_words
from mlx_dflash.files.folders import new_folder, refuse_existing
from mlx_dflash.files.gguf import GGUFFile
from mlx_dflash.files.safetensors import cast, write_config, write_json, write_tensors

from .card import conversion_card
from .gguf_models import model_config, model_weights

EXACT_DTYPES = {"Q4_0": "float16", "Q4_1": "float16", "Q8_0": "float16", "F16": "float16", "BF16": "bfloat16"}


def convert_gguf(
    gguf_path: str | Path, mlx_path: str | Path, dtype: str | None = None, progress: bool | None = None
) -> Path:
    """Convert a GGUF file of a common family into the new folder `mlx_path`, and return the folder.

    dtype: "float16", "bfloat16" or "float32" of scales, norms and unquantized matrices; None keeps the one of the
    file's matrices, in which scales are exact. progress: None shows a bar when stderr is a terminal.
    Raises ValueError for an existing folder and for anything that cannot be carried over; then no folder is left.
    """
    refuse_existing(mlx_path)
    steps = tqdm(total=4, desc="Read GGUF", leave=False, disable=None if progress is None else not progress)
    with new_folder(mlx_path) as folder, steps:
        gguf = GGUFFile(gguf_path)
        config = model_config(gguf)
        steps.update()
        steps.set_description("Convert tokenizer")
        config |= _write_tokenizer(gguf, folder)
        steps.update()
        steps.set_description("Write weights")
        dtype = dtype or EXACT_DTYPES.get(gguf.entry("token_embd.weight").type, "float32")
        weights = {name: cast(name, w, dtype) for name, w in model_weights(gguf, config).items()}
        write_tensors(folder, weights)
        write_config(folder, config | {"dtype": dtype, "torch_dtype": dtype})
        conversion_card(Path(mlx_path).name, str(gguf_path), _facts(gguf, config)).write(folder)
        steps.update()
        steps.set_description("Check")
        _check_loads(folder, gguf)
        steps.update()
    return Path(mlx_path)


def _facts(gguf: GGUFFile, config: dict) -> dict[str, str]:
    """Return what the model card says: name -> value."""
    types = sorted({entry.type for entry in gguf.directory.values()})
    return {
        "model type": config["model_type"],
        "types in the file": ", ".join(types),
        "weights": weights_in_words(config),
    }


def _write_tokenizer(gguf: GGUFFile, folder: Path) -> dict:
    """Write the tokenizer's files and generation_config.json; give the token ids for config.json."""
    from .gguf_tokenizer import gguf_tokenizer, special_ids

    gguf_tokenizer(gguf).save_pretrained(folder)
    ids = special_ids(gguf)
    stops = list(dict.fromkeys(ids[role] for role in ("eos", "eot") if role in ids))
    named = {"bos_token_id": ids.get("bos"), "eos_token_id": stops[0] if len(stops) == 1 else stops or None}
    named |= {"pad_token_id": ids.get("pad")}
    token_ids = {key: value for key, value in named.items() if value is not None}
    write_json(folder / "generation_config.json", token_ids)
    return token_ids


def _check_loads(folder: Path, gguf: GGUFFile) -> None:
    """Build the model that config.json describes and fit the weights to it: none missing, none left, shapes equal."""
    from mlx_lm.utils import load_model

    try:
        load_model(folder, lazy=True)
    except ValueError as error:
        raise ValueError(f"{gguf.path.name} does not fill the model that its metadata describes: {error}") from error
