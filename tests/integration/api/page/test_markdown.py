"""Answers as Markdown: what a model writes becomes these elements, and never a script or an image."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Dialog, Page, expect

from tests.support.page.scripted_gateway import ScriptedGateway, opened

RENDER = """async (parts) => {
    const { Markdown, withoutMarks } = await import('/page/chat/markdown.js');
    const node = document.createElement('div');
    document.body.append(node);
    const shown = new Markdown(node);
    let text = '';
    for (const part of parts) shown.show(text += withoutMarks(part));
    return node.innerHTML;
}"""
"""Shows a text that comes in these parts, in the document."""
WRITTEN = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# Title\ntext": "<h3>Title</h3><p>text</p>",
    "###### Deep ##": "<h6>Deep</h6>",
    "**bold**, *it* and _it_, ~~gone~~, `a<b>`": "<p><strong>bold</strong>, <em>it</em> and <em>it</em>, "
    "<s>gone</s>, <code>a&lt;b&gt;</code></p>",
    "**bold *both* end**": "<p><strong>bold <em>both</em> end</strong></p>",
    "snake_case_name and 2*3*4 = 24": "<p>snake_case_name and 2<em>3</em>4 = 24</p>",
    r"\*not\* emphasis": "<p>*not* emphasis</p>",
    "- one\n- two\n  - in\n- three": "<ul><li>one</li><li>two<ul><li>in</li></ul></li><li>three</li></ul>",
    "3. **Three**: x\n\n4. Four": '<ol start="3"><li><strong>Three</strong>: x</li><li>Four</li></ol>',
    "1. a\n   more\n\n   again": '<ol start="1"><li>a\nmore<p>again</p></li></ol>',
    "```py\nif a < b:\n    **x**\n```\nafter": '<pre tabindex="0" aria-label="Code py"><code>if a &lt; b:\n'
    "    **x**</code></pre><p>after</p>",
    "```\nnot closed": '<pre tabindex="0" aria-label="Code"><code>not closed</code></pre>',
    "> quoted\n> - item": "<blockquote><p>quoted</p><ul><li>item</li></ul></blockquote>",
    "| a | b |\n|---|:-:|\n| 1 | `x` |": '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr>'
    "</thead><tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table></div>",
    "---": "<hr>",
    "[here](https://a.b/c_(d)?e=f) or https://x.y/z.": '<p><a href="https://a.b/c_(d)?e=f" '
    'rel="noopener noreferrer nofollow" target="_blank">here</a> or <a href="https://x.y/z" '
    'rel="noopener noreferrer nofollow" target="_blank">https://x.y/z</a>.</p>',
}
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1))",
    "[x](//evil.example)",
    "[x](file:///etc/passwd)",
    '[x](https://a.b/"onmouseover="alert(1))',
    "![x](https://evil.example/track.png)",
    "`<img src=x onerror=alert(1)>`",
    "```html\n<svg onload=alert(1)>\n```",
    '```"><script>alert(1)</script>\n```',
    "# <iframe srcdoc='<script>alert(1)</script>'>",
    "| <b onclick=alert(1)>x</b> | y |\n|---|---|\n| <script>1</script> | z |",
    "<style>*{display:none}</style><base href=//evil.example>",
    "\ue000\ue001\uf8ff**\ue000**",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
]
LONG = [">" * 3000 + " deep", "- " * 3000, "**a " * 3000, "[" * 5000, "`" * 5000, "_a" * 5000, "|" * 4000]
ALLOWED = set("P H3 H4 H5 H6 UL OL LI PRE CODE BLOCKQUOTE HR DIV TABLE THEAD TBODY TR TH TD".split())
ALLOWED |= set("STRONG EM S A".split())


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with ScriptedGateway() as gateway, opened(browser, gateway.url) as page:
        yield page


def render(page: Page, *parts: str) -> str:
    return str(page.evaluate(RENDER, parts))


def test_the_usual_subset(page: Page, subtests: pytest.Subtests) -> None:
    for text, expected in WRITTEN.items():
        with subtests.test(text=text):
            assert render(page, text) == expected
            assert render(page, *text) == expected, "token by token"


def test_hostile_texts_stay_texts(page: Page, subtests: pytest.Subtests) -> None:
    dialogs: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for text in HOSTILE:
        with subtests.test(text=text):
            render(page, text)
            nodes: list[list[object]] = page.evaluate(
                "[...document.body.lastElementChild.querySelectorAll('*')].map("
                "one => [one.tagName, one.protocol ?? '', ...one.getAttributeNames()])"
            )
            assert {str(tag) for tag, *_ in nodes} <= ALLOWED
            assert {name for _, _, *names in nodes for name in names} <= {
                *("href", "rel", "target", "start", "class", "tabindex", "aria-label")
            }
            assert {protocol for tag, protocol, *_ in nodes if tag == "A"} <= {"https:"}
    assert not dialogs
    assert not [url for url in asked if "evil" in url]


def test_long_and_deep_texts_are_shown_in_time(page: Page) -> None:
    for text in LONG:
        took_ms = page.evaluate(
            f"async text => {{ const begun = performance.now(); await ({RENDER})([text]);"
            " return performance.now() - begun; }",
            text,
        )
        assert took_ms < 5000, text[:20]


def test_an_answer_is_shown_as_markdown_and_kept(browser: Browser) -> None:
    text = "## Tips\n\n1. **Read** a lot\n2. <b>Speak</b>"
    with ScriptedGateway(2, text, gap_s=0.01) as gateway, opened(browser, gateway.url) as page:
        page.get_by_label("Message").fill("Tips?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.model[data-state=done]")).to_be_visible()
        for _ in range(2):
            expect(page.locator(".turn.model h4")).to_have_text("Tips")
            expect(page.locator(".turn.model li").nth(1)).to_have_text("<b>Speak</b>")
            page.reload()


def test_a_pause_within_the_beginning_of_a_line_hides_no_heading(browser: Browser) -> None:
    with ScriptedGateway(2, "## Tips", gap_s=0.8) as gateway, opened(browser, gateway.url) as page:
        page.get_by_label("Message").fill("Tips?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".turn.model[data-state=done]")).to_be_visible()
        expect(page.locator(".turn.model h4")).to_have_text("Tips")
        expect(page.locator(".turn.model h4 .resumed")).to_have_count(1)
