"""Lines without conversations, and malicious chat templates: named errors in bounded time."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from world import BadError, Row, World

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXTS = ("a cat", "", "<|im_end|>", "<|im_start|>assistant\n", "\ud800", "\0", "{{ 7 * 7 }}", "é🎉")
ODD = (
    None,
    True,
    -1,
    10**30,
    0.5,
    [],
    {},
    [[]],
    "x",
    "assistant",
    {"role": "user"},
    [None],
    "a" * 9000,
)
KEYS = ("role", "content", "train", "weight", "tool_calls", "from", "value", "name", "__class__")
LINES, TALKS = 1000, 300
MOST_SAID = 4000

# Each is put into a template where a message's content was, or around all of it.
HURTING = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ ('x' * 10**5) | center(10**9) }}",
    "{{ range(10**8) | list | length }}",
    "{{ 10 ** 10 ** 8 }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self._TemplateReference__context }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{{ messages.append(messages) }}",
    "{{ messages.clear() }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{0:>1000000000}'.format(1) }}",
    "{{ 'x' | indent(10**9) }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{{ raise_exception('x' * 10**6) }}",
    "{% generation %}{% endgeneration %}",
    "{% generation %}{{ m.content }}",
    "{{ strftime_now('%' + 'd' * 10**6) }}",
    "{{ undefined.x.y }}",
    "{{ m.content | tojson | safe | trim | first }}",
    "{" * 20000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
)


def _record(rng: random.Random) -> dict[str, Any]:
    """Return a record of a known form."""
    said = [rng.choice(TEXTS) or "x" for _ in range(2 * rng.randrange(1, 4))]
    form = rng.randrange(3)
    if form == 0:
        return {"prompt": said[0], "completion": said[1]}
    roles = ("user", "assistant") if form == 1 else ("human", "gpt")
    names = ("role", "content") if form == 1 else ("from", "value")
    turns = [
        dict(zip(names, (roles[number % 2], text), strict=True)) for number, text in enumerate(said)
    ]
    return {"messages" if form == 1 else "conversations": turns}


def _spoilt(value: Any, rng: random.Random) -> Any:
    """Return a value with something in it exchanged, added or taken away."""
    if rng.random() < 0.2:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        if rng.random() < 0.25:
            return {**value, rng.choice(KEYS): rng.choice(ODD)}
        return {**value, key: _spoilt(value[key], rng)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], _spoilt(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def _line(rng: random.Random) -> bytes:
    record = _record(rng)
    line = json.dumps(_spoilt(record, rng) if rng.random() < 0.7 else record).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(line))
        cut: tuple[Callable[[], bytes], ...] = (
            lambda: line[:at],
            lambda: line[:at] + bytes([rng.randrange(256)]) + line[at + 1 :],
            lambda: line[:at] + b"NaN" + line[at:],
            lambda: b"[" * 50_000,
            lambda: b'{"messages": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
            lambda: b'{"messages": [], "messages": 1}',
        )
        line = rng.choice(cut)()
    return line.replace(b"\n", b" ")


def hostile_lines(world: World, rng: random.Random, scratch: Path) -> None:
    """Read a file of drawn lines; each is a conversation, or is named."""
    from mt_data import ChatReader, DataError
    from mt_data.documents.conversations import read_lines
    from mt_tokenizer import ChatTemplate, train_tokenizer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(["a cat. x"], 300, special)
    end = tokenizer.special_tokens["<|im_end|>"]
    content = b"\n".join(_line(rng) for _ in range(LINES))
    path = scratch / "talks.jsonl.gz"
    packed = gzip.compress(content)
    path.write_bytes(packed if rng.random() < 0.8 else packed[: rng.randrange(len(packed))])
    wrong: list[DataError] = []
    with ChatTemplate(CHATML, tokenizer) as template:
        reader = ChatReader(tokenizer, template, size=512, too_long="drop")
        try:
            for found in reader.read(read_lines(path), wrong.append):
                _check_ends(found.ids, found.trained, end, tokenizer.eod_id)
        except DataError as error:  # of the whole file, as where it is cut short
            wrong.append(error)
    for error in wrong:
        if "talks.jsonl" not in str(error) or len(str(error)) > MOST_SAID:
            raise BadError(f"a line is not named in short: {error!r:.300}")


def _check_ends(ids: list[int], trained: list[float], *ends: int) -> None:
    """Check that each learnt turn of a conversation ends with a token that ends it."""
    if len(ids) != len(trained):
        raise BadError(f"{len(ids)} tokens with {len(trained)} weights")
    for number, weight, after in zip(ids, trained, [*trained[1:], 0.0], strict=True):
        if weight and not after and number not in ends:
            raise BadError(f"a learnt turn ends with token {number}")


def spelt_roles(world: World, rng: random.Random, scratch: Path) -> None:
    """Render roles and texts that spell special tokens: no token comes that is not the template's.

    Without a message of the role `assistant` nothing is learnt.
    """
    from mt_tokenizer import ChatTemplate, train_tokenizer

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(["a cat. x"], 300, names)
    special = tokenizer.special_tokens
    pieces = (*names, "assistant", "user", "\n", "<|im_", "end|>", "\\", "{{ eos_token }}", "é")
    with ChatTemplate(CHATML, tokenizer) as template:
        for _ in range(TALKS):
            talk = [
                {
                    key: "".join(rng.choices(pieces, k=rng.randrange(1, 5)))
                    for key in ("role", "content")
                }
                for _ in range(rng.randrange(1, 5))
            ]
            ids, trained = template.render(talk)
            count = {name: ids.count(special[name]) for name in names}
            wanted = {names[0]: 0, names[1]: len(talk), names[2]: len(talk)}
            learnt = any(each["role"] == "assistant" for each in talk)
            if count != wanted or (any(trained) and not learnt):
                raise BadError(f"{talk} has the special tokens {count}, learnt: {any(trained)}")
            said = "".join(f"{names[1]}{m['role']}\n{m['content']}{names[2]}\n" for m in talk)
            if tokenizer.decode(ids) != said:
                raise BadError(f"{talk} became {tokenizer.decode(ids)!r}")


def hurting_template(world: World, rng: random.Random, scratch: Path) -> None:
    """Render a template that loops, allocates, or reaches for the interpreter."""
    from mt_tokenizer import ChatError, ChatTemplate, train_tokenizer

    tokenizer = train_tokenizer(["a cat"], 300, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    part = rng.choice(HURTING)
    source = CHATML.replace("{{ m.content }}", part) if rng.random() < 0.5 else part + CHATML
    if rng.random() < 0.3:
        at = rng.randrange(len(source))
        source = source[:at] + source[at + 1 :]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        with ChatTemplate(source, tokenizer) as template:
            template.render(talk)
    except ChatError as error:
        if len(str(error)) > MOST_SAID:
            raise BadError(f"a message of {len(str(error))}: {str(error)[:200]}") from None


ROWS = [
    Row(name="lines that are no conversations", attack=hostile_lines, cases=100, sample=1),
    Row(name="roles that spell special tokens, 300 a case", attack=spelt_roles, cases=40, sample=1),
    Row(
        name="chat templates made to hurt",
        attack=hurting_template,
        cases=500,
        sample=1,
        seconds=150,
    ),
]
