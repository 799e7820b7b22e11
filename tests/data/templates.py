"""Chat templates that write what those of published models write, and tokenizers for them.

Of each family: the template, the special tokens of its tokenizer, and what tokenizer_config.json
says of them. The templates are restricted to what a conversation without tools needs.
test_published_templates.py has the published ones of Llama, Qwen, Phi and Gemma, and
test_mistral_templates.py compares those of Mistral with the tokens of its own package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from tests.bpe import train_bpe

LLAMA_3 = """\
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif -%}
{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}
        {%- set head = 'Today Date: ' + date_string + '\\n\\n' %}
    {%- else %}
        {%- set head = '' %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + head }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_2_5 = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Thoughts of answers before the last question are left out; the last answer always has some.
QWEN_3 = """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set thought, answer = '', message.content %}
        {%- if '</think>' in answer %}
            {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' + answer.lstrip('\\n') }}
        {%- else %}
            {{- answer }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Instructions of the third version of Mistral's tokenizers: the system message goes in front of the
# last question, and the spaces behind an answer are dropped.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system, talk = messages[0]['content'] + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, talk = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for message in talk %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set last = loop.index0 >= talk | length - 2 %}
        {{- '[INST] ' + (system if last else '') + message['content'] + '[/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].rstrip(' ') + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# In the first version the instruction marks are text, and the system message is in the first one.
MISTRAL_V1 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system, talk = messages[0]['content'] + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, talk = '', messages %}
{%- endif %}
{{- bos_token }}
{%- for message in talk %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# In the seventh version the system message has marks of its own.
MISTRAL_V7 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].rstrip(' ') + eos_token }}
    {%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()  # tokens that text may contain
    config: tuple[tuple[str, str], ...] = ()
    eod: str = "<|endoftext|>"
    strips: bool = False  # whether special tokens take the white space behind them


FAMILIES = {
    "llama3": Family(
        LLAMA_3,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        config=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
        eod="<|end_of_text|>",
    ),
    "qwen2.5": Family(
        QWEN_2_5, ("<|im_start|>", "<|im_end|>"), config=(("eos_token", "<|im_end|>"),)
    ),
    "qwen3": Family(
        QWEN_3,
        ("<|im_start|>", "<|im_end|>"),
        added=("<think>", "</think>"),
        config=(("eos_token", "<|im_end|>"),),
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]"),
        config=(("bos_token", "<s>"), ("eos_token", "</s>")),
        eod="</s>",
    ),
}
CORPUS = ["How many legs has a spider? Eight.\n", "Wie viele Füße? 8, nicht 6.\n"] * 20


def write_tokenizer(directory: Path, name: str) -> str:
    """A byte-level BPE with a family's tokens and template; returns its spec."""
    return write_family(directory, FAMILIES[name])


def write_family(directory: Path, family: Family) -> str:
    """Write the tokenizer of a family that FAMILIES need not have; returns its spec."""
    model = train_bpe(CORPUS, vocab_size=300)
    model.add_special_tokens([AddedToken(token, rstrip=family.strips) for token in family.special])
    model.add_tokens(list(family.added))
    directory.mkdir(parents=True, exist_ok=True)
    model.save(str(directory / "tokenizer.json"))
    config = {**dict(family.config), "chat_template": family.template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return f"hf:{directory / 'tokenizer.json'}?eod={family.eod}"
