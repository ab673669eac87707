"""Tokenizers of a few hundred tokens, built in code, with the seams that real ones have."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Writes its own BOS, knows two roles and demands that they alternate, like Mistral's.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
#: Drops messages of roles it does not know, without an error.
DROPS_TOOLS = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(
    chat_template: str | None = None, *, bos: bool = False
) -> PreTrainedTokenizerFast:
    """Bytes plus a few merges: "\\n\\n", and ".\\n"-free words, so that seams can shift tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r")]
    tokens = alphabet + [a + b for a, b in merges]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if bos:
        ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=ids
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer
