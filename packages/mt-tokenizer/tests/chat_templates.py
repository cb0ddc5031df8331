"""Chat templates of the shapes that published models have, in short."""

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m.role %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

DEEPSEEK = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}<|Assistant|>
    {%- for call in m.tool_calls %}<|call|>{{ call.function.name }}{% endfor %}
    {{- eos_token }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + eos_token }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

# Empty think tags are written into every answer, and into the prompt where thinking is off.
QWEN = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content | default('') }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# Qwen 3's own rule: the thoughts of an earlier answer are left out once the user speaks again.
FORGETS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.last and m.role == 'assistant' %}<think>
{{ m.reasoning_content | default('') }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.tool_calls %}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# What the assistant says is marked; the token that ends the turn is behind the tag.
MARKED = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The token is within the tag, and so is a line end.
MARKED_WHOLE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}"""

PHI = """\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

PLAIN = """\
{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

# The last message alone loses its spaces, so an answer changes when the conversation goes on.
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim if loop.last else m.content }}")

SPECIAL = [
    "<|endoftext|>",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "<|call|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
WRITABLE = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "qwen": QWEN,
    "tools": TOOLS,
    "marked": MARKED,
    "marked_whole": MARKED_WHOLE,
    "phi": PHI,
    "plain": PLAIN,
}
