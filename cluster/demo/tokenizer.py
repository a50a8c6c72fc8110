"""A byte-level BPE tokenizer with a chat template, trained in a second or two."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, START, END = "<|pad|>", "<|begin|>", "<|im_start|>", "<|im_end|>"
# Text that tool and reasoning parsers look for. Ordinary tokens: they stay in the decoded text.
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")

# ChatML, with tools in the Hermes form: vLLM's `hermes` tool parser and `qwen3` reasoning parser read its answers.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\nCall one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_len: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of exactly `vocab_size` tokens, the same for the same texts. Raw text begins with the BOS token.

    Raises:
        ValueError: the texts hold too few different pairs for so large a vocabulary.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, BOS, START, END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(MARKUP),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    tokenizer.save_pretrained(str(directory))
