"""The chat page in a headless browser, before a live server and before one whose answers a test sets."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from runtime.made_up_calibration import calibrate, exit_after
from serve.chromium import Page, browsing
from serve.live import Served, listening
from serve.stub_chat import LAYERS, StubChat
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_serve import ServeConfig, make_app
from tide_serve.http.middlewares import guard

ANSWERED = "document.querySelector('article.assistant .depths:not([hidden])')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@dataclass(frozen=True)
class Chat:
    """The page, opened afresh for a test, and the stub behind it."""

    page: Page
    stub: StubChat
    url: str

    def send(self, text: str) -> None:
        self.page.click("#prompt")
        self.page.type(text)
        self.page.press("Enter")

    def ask(self, text: str) -> None:
        """Send, and wait for the whole answer."""
        answers = self.page.evaluate("document.querySelectorAll('.depths:not([hidden])').length")
        self.send(text)
        self.page.wait_for(f"document.querySelectorAll('.depths:not([hidden])').length > {answers}")


@pytest.fixture(scope="module")
def stub_server() -> Iterator[tuple[StubChat, str]]:
    stub = StubChat()
    with listening(stub.app) as url:
        yield stub, url


@pytest.fixture
def chat(browser: Page, stub_server: tuple[StubChat, str]) -> Chat:
    stub, url = stub_server
    vars(stub).update({name: value for name, value in vars(StubChat()).items() if name != "app"})
    return _opened(browser, stub, url)


def _opened(browser: Page, stub: StubChat, url: str) -> Chat:
    browser.open(f"{url}/")
    browser.evaluate("sessionStorage.clear()")
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(f"{url}/")
    browser.wait_for("document.title !== 'TIDE chat' || !document.querySelector('#problem').hidden")
    return Chat(browser, stub, url)


def test_thoughts_are_shown_apart_and_not_sent_back(chat: Chat) -> None:
    """Breaks: the page stands still while a model thinks, or takes its thoughts for its answer."""
    assert chat.page.evaluate("document.querySelector('#turn').content.querySelector('details').hidden")
    chat.stub.thoughts = "Hm."
    chat.ask("Hi?")
    assert chat.page.text("article.assistant .thoughts") == "Hm." and chat.page.text("article.assistant .text") == "Hello there."
    chat.ask("And?")
    assert chat.stub.requests[-1]["messages"][1] == {"role": "assistant", "content": "Hello there."}
    assert chat.page.complaints == []


def test_tokens_arrive_in_the_colour_of_their_depth(chat: Chat) -> None:
    """Breaks: the page shows an answer without what it is there to show, or its figures are wrong."""
    chat.ask("Hi?")
    page = chat.page
    assert page.text("article.user .text") == "Hi?" and page.text("article.assistant .text") == "Hello there."
    tokens = page.evaluate("[...document.querySelectorAll('.token')].map(t => [t.textContent, t.className, t.title])")
    assert tokens == [
        ["Hello", "token band-4", f"{LAYERS} layers"],
        [" there", "token band-0", "0 layers"],
        [".", "token band-2", "12 layers"],
    ]
    colours = page.evaluate("[...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)")
    assert len(set(colours)) == 3
    figures = page.text("article.assistant .figures")
    assert figures.startswith("3 tokens · ") and " tokens/s · first after " in figures
    assert figures.endswith("14.2 of 30 layers per token · 2 of 3 drafts accepted")
    assert page.text("article.assistant .depths").split("\n") == ["0 layers: 1 token", "12 layers: 1 token", "30 layers: 1 token"]
    page.click("#configure")
    page.click("#colours")
    assert page.evaluate("document.querySelector('article.assistant .text').innerHTML") == "<p>Hello there.</p>"
    assert page.complaints == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# A *b*\n\none\ntwo\n***\n", "<h4>A <em>b</em></h4><p>one\ntwo</p><hr>"),
        (
            "1. a\n2. b\n   - c\n\n     d\n\ne",
            '<ol start="1"><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><p>d</p></li></ul></li></ol><p>e</p>',
        ),
        ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><p>c</p>"),
        (
            "|a|b|\n|-|:-:|\n|`1`|2|",
            "<table><tbody><tr><th>a</th><th>b</th></tr><tr><td><code>1</code></td><td>2</td></tr></tbody></table>",
        ),
        ("a_b_c 2 * 3 * 4 **y**, _z_ \\*k\\*", "<p>a_b_c 2 * 3 * 4 <strong>y</strong>, <em>z</em> *k*</p>"),
        (
            "[x](javascript:y) [x](https://e.org/?a=1&b)",
            '<p>[x](javascript:y) <a href="https://e.org/?a=1&amp;b" target="_blank" rel="noopener noreferrer">x</a></p>',
        ),
        ("<img src=x onerror=y> **<b>**", "<p>&lt;img src=x onerror=y&gt; <strong>&lt;b&gt;</strong></p>"),
        (
            "```py\n**a** <b>\n\n# c",
            '<div class="code"><p>py<button type="button" class="plain">Copy</button></p>'
            "<pre><code>**a** &lt;b&gt;\n\n# c</code></pre></div>",
        ),
    ],
)
def test_an_answer_is_drawn_as_markdown_where_there_are_no_exits(chat: Chat, text: str, html: str) -> None:
    """Breaks: every model's answer is full of asterisks and fences; or what a model writes becomes a part of the page."""
    chat.stub.exits, chat.stub.pieces = False, [(part, LAYERS) for part in (text[:5], text[5:])]
    chat = _opened(chat.page, chat.stub, chat.url)
    chat.ask("*Hi?*")
    page = chat.page
    assert page.evaluate("document.querySelector('article.assistant .text').innerHTML") == html
    assert page.text("article.user .text") == "*Hi?*" and page.complaints == []


def test_html_in_an_answer_is_text(chat: Chat) -> None:
    """Breaks: a text that a model was talked into runs a script in the reader's browser, with the API key."""
    attack = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script><b>bold</b>'
    chat.stub.pieces = [(attack[:9], LAYERS), (attack[9:], 3)]
    chat.ask(attack)
    page = chat.page
    assert page.text("article.assistant .text") == attack == page.text("article.user .text")
    assert page.evaluate("[window.attacked, document.querySelectorAll('article :is(img, script, b)').length]") == [None, 0]


def test_the_page_talks_to_its_own_server_only(chat: Chat) -> None:
    """Breaks: a script that got into the page sends the conversation elsewhere, or the page needs the internet."""
    chat.ask("Hi?")
    page, own = chat.page, urlsplit(chat.url).netloc
    assert {urlsplit(url).netloc for url in page.requests} == {own}
    page.requests.clear()
    other = "http://127.0.0.2:9"  # a host that the policy must keep the browser from
    assert page.evaluate(f"fetch('{other}').then(() => 'sent', error => error.name)") == "TypeError"
    page.evaluate(f"new Promise(done => {{ const i = new Image(); i.onerror = done; i.src = '{other}/x.png'; }})")
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s) })()"
    )
    assert page.evaluate("window.ran") is None
    assert sum("Content Security Policy" in line for line in page.complaints) >= 3


def test_stop_ends_the_request_and_keeps_the_text(chat: Chat) -> None:
    """Breaks: a stopped answer goes on costing tokens, or the reader loses what was there."""
    chat.stub.hangs = True
    chat.send("Hi?")
    page = chat.page
    page.wait_for("document.querySelector('article.assistant .text')?.textContent === 'Hello there.'")
    assert page.evaluate("document.querySelector('#turns').getAttribute('aria-busy')") == "true"
    page.click("#stop")
    page.wait_for(ANSWERED)
    assert page.text("article.assistant .figures").endswith(" · stopped")
    assert page.text("article.assistant .text") == "Hello there." and page.text("#problem") == ""
    deadline = time.monotonic() + 10
    while not chat.stub.left:
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.005)
    chat.stub.hangs = False
    chat.ask("And then?")
    assert [turn["content"] for turn in chat.stub.requests[1]["messages"]] == ["Hi?", "Hello there.", "And then?"]


def test_settings_are_sent(chat: Chat) -> None:
    """Breaks: a control does nothing."""
    chat.ask("One")
    chat.page.click("#configure")
    for field, text in (("#system", "Be brief."), ("#temperature", "0.5"), ("#max-tokens", "7")):
        chat.page.click(field)
        chat.page.type(text)
    chat.ask("Two")
    first, second = chat.stub.requests
    assert not {"temperature", "max_tokens"} & set(first) and first["model"] == "stub-model"
    assert (second["temperature"], second["max_tokens"]) == (0.5, 7)
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "user"]
    chat.page.click("#new")
    assert chat.page.evaluate("document.querySelectorAll('article').length") == 0
    chat.ask("Three")
    assert [turn["content"] for turn in chat.stub.requests[2]["messages"]] == ["Be brief.", "Three"]


def test_the_api_key_stays_in_the_tab(chat: Chat) -> None:
    """Breaks: a server with keys cannot be used, or the key outlives the tab."""
    chat.stub.key = "secret"
    page = _opened(chat.page, chat.stub, chat.url).page
    assert page.text("#problem") == "the API key is wrong"
    page.wait_for("document.activeElement.id === 'key'")
    page.type("secret")
    page.press("Enter")
    page.wait_for("document.querySelector('#model').textContent === 'stub-model'")
    chat.ask("Hi?")
    assert page.evaluate("[{...sessionStorage}, localStorage.length, document.cookie]") == [{"tide-api-key": "secret"}, 0, ""]
    assert not any("secret" in url for url in page.requests)


@pytest.mark.parametrize("pieces", [[], [("Hello", LAYERS)]])
def test_an_error_in_the_stream_is_shown(chat: Chat, pieces: list[tuple[str, int]]) -> None:
    """Breaks: an answer that failed looks complete, or the reader has to type the message again."""
    chat.stub.error, chat.stub.pieces = "the engine <failed>", pieces
    chat.send("Hi?")
    chat.page.wait_for("!document.querySelector('#problem').hidden")
    assert chat.page.text("#problem") == "the engine <failed>"
    assert chat.page.evaluate("document.querySelector('#prompt').value") == ("" if pieces else "Hi?")
    assert chat.page.evaluate("document.querySelectorAll('article').length") == 2 * len(pieces)


def test_the_keyboard_is_enough(chat: Chat) -> None:
    """Breaks: a reader without a mouse cannot send, stop, or reach the settings."""
    page = chat.page
    page.wait_for("document.activeElement.id === 'prompt'")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    chat.stub.hangs = True
    page.press("Enter")
    page.wait_for("document.querySelector('article.assistant .text')?.textContent === 'Hello there.'")
    assert chat.stub.requests[0]["messages"][0]["content"] == "one\ntwo"
    page.press("Escape")
    page.wait_for(ANSWERED)
    reached = []
    for _ in range(6):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"send", "new", "configure"} <= set(reached)


@pytest.fixture(scope="module")
def exiting(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A live server as `tide-serve` starts it, with a key. Two tokens of three are final after layer 1."""
    copy = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("exits") / "tiny-chat"))
    calibrate(copy, exits=[exit_after(1)])
    depth = DepthOptions(threshold=0.0, max_exit_streak=2)
    with Engine.load(copy, EngineOptions(policy="exit", depth=depth, threads=ThreadOptions(1))) as engine:
        app = make_app(engine, ServeConfig(api_keys=("secret",)))
        with listening(guard(app, app.state.service)) as url:
            yield Served(url, engine, app)


def test_a_live_server(browser: Page, exiting: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: the page and the API have different ideas of a stream, of depths, or of how a client leaves."""
    chat = _opened(browser, StubChat(), exiting.url)
    browser.wait_for("document.activeElement.id === 'key'")
    browser.type("secret")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#model').textContent !== 'TIDE'")
    browser.complaints.clear()  # the request without a key
    browser.click("#max-tokens")
    browser.type("40")
    chat.ask("How is the weather?")
    assert browser.text("#model") == exiting.engine.manifest.model.name
    bands = browser.evaluate("[...new Set([...document.querySelectorAll('.token')].map(t => t.className))].sort()")
    assert {"token band-1", "token band-4"} <= set(bands)  # others: characters of several tokens
    figures = browser.text("article.assistant .figures")
    assert figures.startswith("40 tokens · ") and " of 4 layers per token" in figures and figures.endswith("limit of tokens")
    prompt = exiting.engine.chat_prompt([{"role": "user", "content": "How is the weather?"}])
    [wanted] = exiting.engine.generate(prompt, exiting.engine.default_params(max_new_tokens=40))
    assert browser.evaluate("document.querySelector('article.assistant .text').textContent") == wanted.text

    step = exiting.engine.policy.step
    monkeypatch.setattr(exiting.engine.policy, "step", lambda *work: time.sleep(0.02) or step(*work))
    browser.evaluate("document.querySelector('#max-tokens').value = ''")
    chat.send("Go on")
    browser.wait_for("document.querySelectorAll('article.assistant')[1]?.querySelectorAll('.token').length > 2")
    browser.press("Escape")
    browser.wait_for("document.querySelectorAll('.depths:not([hidden])').length === 2")
    exiting.wait_idle(5)  # the text would have taken 10 s
    assert browser.complaints == []
