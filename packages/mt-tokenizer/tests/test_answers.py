"""Answers of chat models are taken apart: no text is lost, and pieces make no difference."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_tokenizer import (
    AnswerForm,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ChatAnswer,
    Content,
    ToolCall,
    parse_answer,
)

ARGUMENTS = '{"city": "Z\u00fcrich \\"x\\" }]", "days": [1, {"a": null}]}'
CALL = ToolCall(name="weather", arguments=ARGUMENTS)
OTHER = ToolCall(name="time", arguments="{}")
FUNCTIONS = ("weather", "time")
THINK = ("<think>", "</think>")
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
ONE, DONE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"
WEATHER = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
TIME = '{"arguments": {}, "name": "time", "id": "a1b2c3d4e"}'
BLOCK = f"{SEP}weather\n```json\n{ARGUMENTS}\n```{DONE}"
TWO_CALLS = {
    "hermes": f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{TIME}</tool_call>",
    "llama3": f"{WEATHER.replace('arguments', 'parameters')}; {TIME}",
    "mistral": f"[TOOL_CALLS] [{WEATHER}, {TIME}]",
    "deepseek": f"{BEGIN}{ONE}function{BLOCK}\n{ONE}time{SEP}{{}}{DONE}{END}",
}
NEWER = f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{{}}"
BROKEN = {
    "no object": "nothing",
    "cut": WEATHER[:-3],
    "no name": '{"arguments": {}}',
    "another function": WEATHER.replace("weather", "rain"),
    "no arguments": WEATHER.replace(ARGUMENTS, "[1]"),
    "not JSON": WEATHER.replace("null", "nul"),
    "NaN": WEATHER.replace("null", "NaN"),
    "deep": WEATHER.replace("null", "[" * 200 + "]" * 200),
    "two names": WEATHER.replace("{", '{"name": "time", ', 1),
    "two arguments": WEATHER.replace("{", '{"parameters": {}, ', 1),
    "line end in a string": WEATHER.replace("rich", "\n"),
    "digits": WEATHER.replace("null", "1" * 5000),
}


def events_of(pieces, form, **how):
    parser = AnswerParser(form, **how)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def joined(events):
    """Join neighbours of one kind, which pieces cut differently."""
    found = []
    for event in events:
        last = found[-1] if found else None
        if type(event) is type(last) and hasattr(event, "text"):
            kept = {"index": event.index} if isinstance(event, CallArguments) else {}
            found[-1] = type(event)(text=last.text + event.text, **kept)
        else:
            found.append(event)
    return found


@pytest.mark.parametrize("form", TWO_CALLS)
def test_calls_come_out_and_the_text_around_them_stays(form):
    text = TWO_CALLS[form]
    how = {"functions": FUNCTIONS}
    named = AnswerForm(calls=form, reasoning=THINK)
    assert parse_answer(text, named, **how) == ChatAnswer(calls=(CALL, OTHER))
    if form != "llama3":
        found = parse_answer(f"Let me see.\n\n{text}\nDone.\n", named, **how)
        assert found == ChatAnswer(content="Let me see.\nDone.\n", calls=(CALL, OTHER))
    thought = parse_answer(f"<think>\nwhich\none?\n</think>\n\n{text}", named, **how)
    assert thought == ChatAnswer(reasoning="which\none?", calls=(CALL, OTHER))
    assert parse_answer(text, named) == ChatAnswer(content=text)
    assert parse_answer(text, AnswerForm(), **how) == ChatAnswer(content=text)


def test_newer_models_of_mistral_write_names_before_arguments():
    found = parse_answer(NEWER, AnswerForm(calls="mistral"), functions=FUNCTIONS)
    assert found == ChatAnswer(calls=(CALL, OTHER))


def test_arguments_come_while_the_model_writes_them():
    begin, end = '<tool_call>{"name": "weather", "arguments": ', "}</tool_call>"
    parser = AnswerParser(AnswerForm(calls="hermes"), functions=FUNCTIONS)
    assert parser.feed("Well") == [Content(text="Well")]
    assert parser.feed(begin) == [CallBegin(index=0, name="weather")]
    for piece in ('{"city": "Z', "\u00fcrich "):
        assert parser.feed(piece) == [CallArguments(index=0, text=piece)]
    assert parser.feed('"}') == [CallArguments(index=0, text='"}')]
    assert parser.feed(end) == [CallEnd(index=0, is_whole=True)]
    assert parser.finish() == []


@pytest.mark.parametrize("problem", BROKEN)
@pytest.mark.parametrize("form", TWO_CALLS)
def test_a_broken_call_is_content(form, problem):
    mark = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3": "<|python_tag|>"}
    text = f"Say: {mark.get(form, BEGIN + ONE)}{BROKEN[problem]}"
    named = AnswerForm(calls=form)
    assert parse_answer(text, named, functions=FUNCTIONS) == ChatAnswer(content=text)


def test_a_call_behind_a_broken_one_is_found():
    text = '<tool_call>{"name": "weather", "arguments": {"a": "' + TWO_CALLS["hermes"]
    found = parse_answer(text, AnswerForm(calls="hermes"), functions=FUNCTIONS)
    assert found.calls == (CALL, OTHER)
    assert found.content == '<tool_call>{"name": "weather", "arguments": {"a": "'
    later = f"[TOOL_CALLS][{WEATHER}, {{broken"
    found = parse_answer(later, AnswerForm(calls="mistral"), functions=FUNCTIONS)
    assert found == ChatAnswer(content=", {broken", calls=(CALL,))


def test_a_stream_says_that_a_call_is_void():
    text = f"<tool_call>{WEATHER[:-9]}"
    events = joined(events_of([text], AnswerForm(calls="hermes"), functions=FUNCTIONS))
    assert [type(event) for event in events] == [CallBegin, CallArguments, CallEnd, Content]
    assert events[2] == CallEnd(index=0, is_whole=False)
    assert events[3] == Content(text=text)


@pytest.mark.parametrize(
    ("value", "arguments"),
    [('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), (None, "{}"), ('{"b":  2}', '{"b":  2}')],
)
def test_arguments_are_an_object_in_any_case(value, arguments):
    rest = "" if value is None else f', "arguments": {value}'
    early = "" if value is None else f'"arguments": {value}, '
    for text in ('{"name": "time"' + rest + "}", "{" + early + '"name": "time"}'):
        found = parse_answer(text, AnswerForm(calls="llama3"), functions=FUNCTIONS)
        assert found.calls == (ToolCall(name="time", arguments=arguments),)


def test_an_object_that_is_no_call_comes_while_it_is_written():
    parser = AnswerParser(AnswerForm(calls="llama3"), functions=FUNCTIONS)
    assert joined(parser.feed('{"answer": 4')) == [Content(text='{"answer": 4')]


def test_a_prompt_may_have_begun_the_reasoning():
    form = AnswerForm(reasoning=THINK)
    prompt = "<|im_start|>assistant\n<think>\n"
    said = parse_answer("so\n</think>\n\nYes", form, prompt=prompt)
    assert said == ChatAnswer(content="Yes", reasoning="so")
    ended = prompt + "\n</think>\n\n"
    assert parse_answer("Yes </think>", form, prompt=ended) == ChatAnswer(content="Yes </think>")
    assert parse_answer("so", form, prompt=prompt) == ChatAnswer(reasoning="so")
    assert parse_answer("a <think>", form) == ChatAnswer(content="a <think>")


@pytest.mark.parametrize(
    ("template", "vocabulary", "calls", "thinks"),
    [
        ("{{ '<tool_call>' }} <think>", (), "hermes", True),
        ("{{ messages }}", ("<tool_call>", "<think>"), "hermes", True),
        ("<tool_call><function=", ("<tool_call>",), None, False),
        ('{"name": "parameters": }', (), None, False),
        ('Environment: ipython "parameters": ', (), "llama3", False),
        ("<|python_tag|>", (), "llama3", False),
        ("[TOOL_CALLS] [THINK]", (), "mistral", True),
        (BEGIN, ("[TOOL_CALLS]",), "deepseek", False),
        ("{{ messages }}", (), None, False),
    ],
)
def test_the_form_is_found_by_its_marks(template, vocabulary, calls, thinks):
    found = AnswerForm.find(template, vocabulary)
    assert found.calls == calls
    assert (found.reasoning is not None) == thinks


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="hermes"):
        AnswerForm(calls="hermes2")


MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("[ARGS]", BEGIN, END, ONE, DONE, SEP, "```json", "```", "function", "weather", "{}"),
    *(WEATHER, TIME, WEATHER[:-9], "{", "}", "[", "]", ",", ";", ":", '"', "\\", "<", "\n", " "),
    *TWO_CALLS.values(),
    *(NEWER, '"name"', "1", "\u00fc\U0001f600", BROKEN["not JSON"]),
]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(MARKS), max_size=9),
    form=st.sampled_from(list(TWO_CALLS)),
    thinks=st.booleans(),
    data=st.data(),
)
def test_any_cut_of_the_text_gives_the_same_and_loses_nothing(parts, form, thinks, data):
    text = "".join(parts)
    how = {"functions": FUNCTIONS, "prompt": "<think>" if thinks else ""}
    named = AnswerForm(calls=form, reasoning=THINK if thinks or len(parts) % 2 else None)
    whole = joined(events_of([text], named, **how))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8)) if text else []
    cuts = [0, *sorted(places), len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    assert joined(events_of(pieces, named, **how)) == whole
    assert joined(events_of(text, named, **how)) == whole
    answer = ChatAnswer.of(whole)
    for call in answer.calls:
        assert call.name in FUNCTIONS
        assert isinstance(json.loads(call.arguments), dict)
    if not answer.calls and not thinks and "think>" not in text:
        assert answer.content == text
