"""Answers in the forms of other libraries are read as those libraries mean them."""

import json
import random
from pathlib import Path

import pytest
from mt_infer.text import StopTexts, TextStream
from mt_tokenizer import (
    AnswerForm,
    AnswerParser,
    ChatAnswer,
    ChatTemplate,
    ToolCall,
    load_tokenizer,
    parse_answer,
    train_tokenizer,
)

NAMES = ("weather", "time.now", "get_user-2")
CALL = ToolCall(name="weather", arguments="{}")
WORDS = ("a", "é", '"', "\\", "{", "]", "</tool", "<", "\n", "日本", "🎉", " ")


def drawn_value(rng, depth=0):
    kind = rng.randrange(4 if depth > 2 else 6)
    if kind < 2:
        return "".join(rng.choices(WORDS, k=rng.randrange(5)))
    if kind < 4:
        return rng.choice([None, True, 7, -1.5, 1e30, 2**70])
    values = [drawn_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 4 else {f"k{n}": value for n, value in enumerate(values)}


def drawn_calls(seed):
    rng = random.Random(seed)
    arguments = [{"a": drawn_value(rng), "b": drawn_value(rng)} for _ in range(rng.randrange(1, 4))]
    return [(rng.choice(NAMES), each) for each in arguments]


def found_calls(answer):
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.fixture(scope="module")
def published():
    """The folder with the tokenizers that Mistral published."""
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("mistral_instruct_tokenizer_240323.model.v3", 3),
        ("tekken_240911.json", 3),
        ("mistral_instruct_tokenizer_241114.model.v7", 7),
    ],
)
def test_mistral(published, file, version):
    from mistral_common.protocol.instruct.messages import AssistantMessage
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    theirs = MistralTokenizer.from_file(published / file).instruct_tokenizer
    ours = load_tokenizer(published / file)
    form = AnswerForm.find("", ours.special_tokens)
    assert form.calls == "mistral"
    for seed in range(50):
        calls = drawn_calls(seed)
        written = [
            ToolCall(id="a1b2c3d4e", function=FunctionCall(name=n, arguments=json.dumps(a)))
            for n, a in calls
        ]
        said = AssistantMessage(content=None, tool_calls=written)
        ids = theirs.encode_assistant_message(said, is_before_last_user_message=False)
        text = ours.decode([each for each in ids if each != ours.eod_id])
        answer = parse_answer(text, form, functions=NAMES)
        assert found_calls(answer) == calls
        assert answer.content == ""
    assert theirs.tokenizer.version.value.startswith(f"v{version}")


def test_qwen_as_transformers_reads_it():
    from transformers.utils.chat_parsing import parse_response

    marks = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"}
    thoughts = {"open": "<think>", "close": "</think>", "content": "text"}
    fields = {
        "reasoning_content": thoughts,
        "tool_calls": {**marks, "content": "json", "repeats": True},
        "content": {"content": "text"},
    }
    theirs = {"fields": fields, "start_anchor": "assistant"}
    form = AnswerForm(calls="hermes", reasoning=("<think>", "</think>"))
    for seed in range(50):
        calls = drawn_calls(seed)
        objects = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
        text = "<think>\nhm\n</think>\n\nSo.\n"
        text += "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        expected = parse_response(text, theirs, prefix="")
        answer = parse_answer(text, form, functions=NAMES)
        given = expected["tool_calls"]
        assert found_calls(answer) == [(each["name"], each["arguments"]) for each in given] == calls
        assert answer.content == expected["content"].strip("\n")
        assert answer.reasoning == expected["reasoning_content"].strip("\n")


@pytest.mark.parametrize("file", ["mistral_instruct_tokenizer_240323.model.v3", None])
def test_marks_that_are_special_tokens_are_in_the_text_of_a_stream(published, file):
    if file is None:
        marks = ["<|eod|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
        tokenizer = train_tokenizer(["the quick brown fox"], 300, marks)
        said = '<think>\nfox \U0001f98a\n</think>\n\nSo <tool_call>{"name": "weather"}</tool_call>'
        form = AnswerForm.find("", tokenizer.special_tokens)
        expected = ChatAnswer(reasoning="fox \U0001f98a", content="So", calls=(CALL,))
    else:
        tokenizer = load_tokenizer(published / file)
        said, form = 'So [TOOL_CALLS] [{"name": "weather"}]', AnswerForm(calls="mistral")
        expected = ChatAnswer(content="So", calls=(CALL,))
    tokens = tokenizer.encode_chat(said)
    assert set(tokens) & set(tokenizer.special_tokens.values())
    stream = TextStream(tokenizer, StopTexts((), tokenizer))
    parser = AnswerParser(form, functions=NAMES)
    events = [e for n in range(1, len(tokens) + 1) for e in parser.feed(stream.next(tokens[:n]))]
    assert ChatAnswer.of(events + parser.finish()) == expected


TEMPLATE = """{%- if tools %}{{ tools | tojson }}
{%- for tool in tools %}{{ tool.function.name }}: {{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_tools_are_rendered_as_by_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    parameters = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é<"}}}
    function = {"name": "weather", "description": 'It\'s\n"x"', "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    for seed in range(10):
        calls = [{"function": {"name": n, "arguments": a}} for n, a in drawn_calls(seed)]
        talk = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        how = {"tools": tools, "add_generation_prompt": True}
        (expected,), _ = render_jinja_template([talk], chat_template=TEMPLATE, **how)
        with ChatTemplate(TEMPLATE) as template:
            assert template.write(talk, tools=tools).text == expected
