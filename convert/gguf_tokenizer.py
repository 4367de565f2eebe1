"""The tokenizer inside a GGUF file as a Hugging Face tokenizer: byte-level BPE ("gpt2") and SentencePiece ("llama").

Works on a GGUFFile's metadata (tokenizer.ggml.*); knows nothing of weights. Pieces: the tokenizers library.
Source: the GGUF specification; pre-tokenizer names: llama.cpp's llama-vocab.cpp.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mlx_dflash.files.gguf import GGUFFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _byte_level(first: pre_tokenizers.PreTokenizer | None, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([first, byte_level]) if first else byte_level


# tokenizer.ggml.pre -> how text is cut before BPE.
PRE_TOKENIZERS = {
    "gpt-2": lambda: _byte_level(None, True),
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), True),
    "llama-bpe": lambda: _byte_level(_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), False),
    "qwen2": lambda: _byte_level(_split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"), False),
}


def gguf_tokenizer(gguf: GGUFFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer with its special tokens and chat template.

    Raises ValueError for a model or pre-tokenizer that is not in the tables, for a vocabulary with duplicates or
    without embedding.
    """
    tokens = gguf.value("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{gguf.path.name} has a token twice; its ids would be ambiguous")
    if len(tokens) > (rows := gguf.entry("token_embd.weight").shape[0]):
        raise ValueError(f"{gguf.path.name} has {len(tokens)} tokens but an embedding of {rows} rows")
    kind = gguf.value("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}
    if kind not in builders:
        raise ValueError(f"{gguf.path.name} has a {kind!r} tokenizer; can convert {', '.join(builders)}")
    tokenizer = builders[kind](gguf, {token: i for i, token in enumerate(tokens)})
    tokenizer.add_tokens(_added_tokens(gguf, tokens))
    _add_template(gguf, tokenizer, tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=gguf.value(f"{gguf.value('general.architecture')}.context_length"),
        chat_template=gguf.metadata.get("tokenizer.chat_template"),
        **{f"{role}_token": tokens[i] for role, i in special_ids(gguf).items() if role != "eot"},
    )


def special_ids(gguf: GGUFFile) -> dict[str, int]:
    """Give the ids of "bos", "eos", "eot" (end of turn), "unk" and "pad", those that the file names.

    Raises ValueError for an id that is no token of the vocabulary.
    """
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    found = {role: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    num_tokens = len(gguf.value("tokenizer.ggml.tokens"))
    for role, i in found.items():
        if i is not None and not 0 <= i < num_tokens:
            raise ValueError(f"{gguf.path.name} names token {i} as {role}, but has {num_tokens} tokens")
    return {role: i for role, i in found.items() if i is not None}


def _byte_level_bpe(gguf: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.value("tokenizer.ggml.merges")]
    name = gguf.value("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{gguf.path.name} cuts text the way of {name!r} before BPE; known are {known}")
    # Llama 3 takes a whole word that is a token before it looks at merges.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    unknown = special_ids(gguf).get("unk", 0)
    merges = _merges(vocab, gguf.value("tokenizer.ggml.scores"))
    names = {i: token for token, i in vocab.items()}
    model = models.BPE(vocab, merges, unk_token=names[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = gguf.value("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if has_prefix else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, the token of the best score first, as SentencePiece joins them."""
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda item: -scores[item[1]]):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(vocab[a], vocab[b], a, b) for a, b in cuts if a in vocab and b in vocab]
        merges += [(a, b) for _, _, a, b in sorted(pairs)]
    return merges


def _added_tokens(gguf: GGUFFile, tokens: list[str]) -> list[AddedToken]:
    types = gguf.metadata.get("tokenizer.ggml.token_type", [])
    special = {CONTROL, UNKNOWN}
    return [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types)
        if kind in special or kind == USER_DEFINED
    ]


def _add_template(gguf: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Put BOS before and EOS behind a text when the file says so (unsaid: BOS for SentencePiece and Llama 3)."""
    is_llama = gguf.value("tokenizer.ggml.model") == "llama" or gguf.value("tokenizer.ggml.pre") == "llama-bpe"
    ids = special_ids(gguf)
    before, behind = [], []
    if gguf.value("tokenizer.ggml.add_bos_token", is_llama) and "bos" in ids:
        before = [tokens[ids["bos"]]]
    if gguf.value("tokenizer.ggml.add_eos_token", False) and "eos" in ids:
        behind = [tokens[ids["eos"]]]
    if before or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *before, "$B", *behind],
            special_tokens=[(token, tokens.index(token)) for token in {*before, *behind}],
        )
