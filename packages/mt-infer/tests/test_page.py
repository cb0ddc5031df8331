"""The page of the server: it loads nothing from elsewhere, and a browser talks with the model."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_infer.server import create_app
from mt_model import GPT, gpt
from mt_tokenizer import train_tokenizer
from serving import served

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
TEXT = '<img src="x" onerror="document.title = 1">'


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("paged") / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_sequence_length": 512}
    save_pretrained(GPT(gpt(vocab_size=264, **sizes, init_std=1), seed=3), path)
    train_tokenizer(["to be or not to be"], 262).save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Engine.from_folder(path, max_batch=2)


@pytest.fixture(scope="module")
def site(engine):
    with served(create_app(engine)) as found:
        yield found


def test_the_page_loads_nothing_from_elsewhere(site):
    found = site.get("/")
    assert found.status == 200
    assert found.headers["content-type"].startswith("text/html")
    policy = dict(
        each.split(" ", 1) for each in found.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in found.headers["content-security-policy"]
    assert re.findall(r"https?://|src=|innerHTML|eval\(", found.text) == []


class Browser:
    """A headless Chromium, told by pipes what to do."""

    def __init__(self, folder):
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        for number in (to_read, to_write):
            os.set_inheritable(number, True)
        # The browser reads commands from 3 and writes answers to 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        command = ["bash", "-c", script, "bash", BROWSER, *options]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        fds = (to_read, to_write)
        self._process = subprocess.Popen(command, pass_fds=fds, start_new_session=True, **silent)
        for number in fds:
            os.close(number)
        self._rest, self._number, self._session = b"", 0, None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        found = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]

    def do(self, method, **params):
        """Send a command, and return its result."""
        self._number += 1
        given = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            given["sessionId"] = self._session
        os.write(self._to, json.dumps(given).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                content = os.read(self._from, 1 << 16)
                assert content, "the browser has ended"
                self._rest += content
            message, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(message)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def value(self, expression):
        """Return the value of an expression of the page."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression, seconds=30):
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, self.value("document.body.innerText")
            time.sleep(0.05)

    def type(self, text):
        """Type a text and Enter."""
        self.do("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.do("Input.dispatchKeyEvent", type="keyDown", **key)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self):
        os.close(self._to)
        os.close(self._from)
        self._process.kill()
        self._process.wait()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")
def test_a_browser_talks_with_the_model(site, engine, tmp_path):
    how, tokenizer = Sampling(temperature=0, max_tokens=6), engine.tokenizer
    prompt = tokenizer.encode_chat(f"system: be\nuser: {TEXT}\nassistant:")
    first = engine.generate(prompt, how)[0].text
    browser = Browser(tmp_path / "profile")
    try:
        browser.do("Page.navigate", url=f"http://127.0.0.1:{site.port}/")
        browser.wait_for("document.querySelectorAll('#model option').length === 1")
        settings = {"system": "be", "temperature": "0", "tokens": "6"}
        for name, value in settings.items():
            browser.value(f"at({name!r}).value = {value!r}")
        browser.value("at('text').focus()")
        browser.type(TEXT)
        browser.wait_for("messages.length === 2")
        assert browser.value("document.querySelector('.user').textContent") == TEXT
        assert browser.value("messages[1].content") == first
        shown = browser.value("document.querySelector('.assistant').textContent")
        assert shown == first
        browser.value("at('tokens').value = '0'")
        browser.type("more")
        browser.wait_for("document.querySelectorAll('.note').length > 1")
        assert "max_tokens" in browser.value(
            "[...document.querySelectorAll('.note')].pop().textContent"
        )
        assert browser.value("messages.length") == 2
        browser.value("at('reset').click()")
        assert browser.value("messages.length + at('talk').children.length") == 0
        assert browser.value("document.title") == "mt-infer"
    finally:
        browser.close()
