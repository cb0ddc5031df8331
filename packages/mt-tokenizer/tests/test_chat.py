"""Chat templates render in a sandbox, and a hostile one is stopped."""

import json
import sys
import time

import pytest
from mt_tokenizer import (
    ChatError,
    ChatLimits,
    ChatTemplate,
    train_tokenizer,
    with_parsed_arguments,
)

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi <b>é</b>"}]
CHATML = """{{ bos_token }}{% for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message['content'] | trim }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_conversation_is_rendered(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "bos_token": {"content": "<s>"}})
    )
    with ChatTemplate.from_folder(tmp_path) as template:
        text = template.write(MESSAGES).text
        assert text == (
            "<s><|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi <b>é</b><|im_end|>\n<|im_start|>assistant\n"
        )
        tools = [{"name": "f", "about": "<é>"}]
        assert '[{"name": "f", "about": "<é>"}]' in template.write(MESSAGES, tools=tools).text
        short = template.write(MESSAGES[:1], add_generation_prompt=False).text
        assert short == "<s><|im_start|>user\nHello<|im_end|>\n"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}"}))
    with ChatTemplate.from_folder(tmp_path) as template:
        assert template.write(MESSAGES).text == "<s>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    with ChatTemplate.from_folder(tmp_path) as template:
        assert template.write(MESSAGES).text == "2"


def test_a_template_of_parts_alone_gets_texts_as_parts():
    """Published templates of LLaVA ignore a content that is a text."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for part in m.content | "
        "selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with ChatTemplate(source) as template:
        assert template.write(MESSAGES).text == "[user]Hello[assistant]Hi <b>é</b>"
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.write(MESSAGES).text == "Hello"


def test_a_folder_without_a_template_says_so(tmp_path):
    with pytest.raises(ChatError, match="chat_template"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' * 1000000000 }}", "Memory|MiB"),
        ("{% for a in range(99999) %}{{ 'b' * 999 }}{% endfor %}", "characters"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ ''.__class__.__mro__ }}", "Security|unsafe"),
        ("{{ messages.append(1) }}", "Security|unsafe"),
        ("{{ 7 / 0 }}", "ZeroDivision"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
        ("{% include '/etc/passwd' %}", "include|loader"),
        ("{% for %}", "wrong"),
    ],
)
def test_a_hostile_template_is_stopped_and_the_next_text_is_rendered(source, word):
    whole = "{% if messages %}{{ messages[0].content }}{% else %}" + source + "{% endif %}"
    with ChatTemplate(whole, limits=ChatLimits(cpu_seconds=1)) as template:
        begin = time.monotonic()
        with pytest.raises(ChatError, match=word):
            template.write([])
        assert time.monotonic() - begin < 20
        if word != "wrong":
            assert template.write(MESSAGES).text == "Hello"


def test_text_of_messages_is_no_template_and_no_program():
    with ChatTemplate("{{ messages[0].content }}") as template:
        for text in ("{{ 7 * 7 }}", "\0\n", "\ud800", "x" * 100_000):
            assert template.write([{"role": "user", "content": text}]).text == text
        with pytest.raises(ChatError, match="JSON"):
            template.write([{"role": "user", "content": object()}])


def test_chat_text_gets_no_token_that_the_template_has_not_written():
    tokenizer = train_tokenizer(["hello"], 260, ["<|eod|>", "<|user|>"])
    ids = tokenizer.encode_chat("<|user|>hello")
    assert ids == [1, *tokenizer.encode("hello")]


def test_arguments_of_calls_are_objects_for_a_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = with_parsed_arguments(talk)
    assert found[:2] == MESSAGES
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[2]["tool_calls"][0]["id"] == "1"
    assert with_parsed_arguments(found) == found
    assert call["function"]["arguments"] == '{"a": 1}'
    for wrong in ("[1]", "{", '{"a": NaN}', '"\\ud800"', "\ud800"):
        call["function"]["arguments"] = wrong
        with pytest.raises(ChatError, match="message 2"):
            with_parsed_arguments(talk)
    for calls in ("f", 5, {"f": 1}, ["f"], [None], [{"function": "f"}]):
        with pytest.raises(ChatError, match="message 2"):
            with_parsed_arguments([*MESSAGES, {"role": "assistant", "tool_calls": calls}])


def test_jinja_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="jinja2"):
        ChatTemplate("")
