"""A tokenizer with one id a byte, and chat templates for it."""

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

BYTE_VOCAB_SIZE = 258


BOS_ID, EOS_ID = 256, 257


def byte_tokenizer(bos=False, bos_in_prompt=False, eos=True, chat_template=None):
    """A tokenizer with one id a byte (id = byte value), no merges, in mlx-lm's wrapper with its detokenizer.

    bos: declare <bos> (256); bos_in_prompt: and put it in front of every encoded text. eos: declare <eos>
    (257). Both ids exist in any case. chat_template: Jinja text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    if bos_in_prompt:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>" if bos or bos_in_prompt else None,
        eos_token="<eos>" if eos else None,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


BOS_CHAT_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE


def _byte_symbols():
    """Byte-level BPE's symbol of every byte -> byte value: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
