"""Markdown of answers: what it becomes, that it does not depend on how the text was cut, and hostile texts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.http.harness import Live
from tests.patience import PATIENCE_S

Run = Callable[..., Any]
# Draw a text that arrives in pieces of some length; the result is compared, so reading markup back is enough.
DRAW = """async ([texts, steps]) => {
  const { Markdown } = await import("./page/markdown.js");
  const draw = (text, step) => {
    const root = document.createElement("div");
    const markdown = new Markdown(root);
    for (let at = 0; at < text.length; at += step) {
      markdown.write(text.slice(at, at + step));
      markdown.render();
    }
    markdown.end();
    return root;
  };
  return texts.map((text) => steps.map((step) => RESULT));
}"""
LOAD = """async () => {
  const { Markdown } = await import("./page/markdown.js");
  const root = document.createElement("div");
  const markdown = new Markdown(root);
  markdown.write("```js\\nlet a\\n```\\n$a$");
  markdown.end();
  while (!root.querySelector("code span") || !root.querySelector(".katex")) {
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}"""  # highlight.js and KaTeX come with the first block of code and the first formula
HTML = DRAW.replace("RESULT", "draw(text, step).innerHTML")
WORK = DRAW.replace(
    "RESULT",
    """(() => {
    const [read, join] = [DOMParser.prototype.parseFromString, CharacterData.prototype.replaceData];
    let work = 0;
    DOMParser.prototype.parseFromString = function (...args) {
      const made = read.apply(this, args);
      work += made.querySelectorAll("*").length + made.body.textContent.length;
      return made;
    };
    CharacterData.prototype.replaceData = function (...args) { work += args[2].length; join.apply(this, args); };
    try { draw(text, step); } finally {
      [DOMParser.prototype.parseFromString, CharacterData.prototype.replaceData] = [read, join];
    }
    return work;
  })()""",
)  # characters and nodes that are made for the page


@pytest.fixture(scope="module")
def run(browser: Browser) -> Iterator[Run]:
    with Live().serving() as live, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if live.url not in request.url else None)
        page.goto(live.url)
        page.evaluate(LOAD)
        yield page.evaluate
        assert complaints == []


def drawn(run: Run, text: str) -> str:
    """Return the markup of a text, without what every element of its kind has."""
    [[whole, in_pieces, in_letters]] = run(HTML, [[text], [10**6, 7, 1]])
    assert whole == in_pieces == in_letters
    for name in ("rel", "target"):
        assert whole.count("<a ") == whole.count(f' {name}="')
    whole = re.sub(r"(?<=>)\n(?=<(?!/code))", "", whole)  # between blocks
    for common in (' dir="auto"', ' class=""', ' target="_blank"', ' rel="noopener noreferrer nofollow"'):
        whole = whole.replace(common, "")
    assert isinstance(whole, str)
    return whole


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# One\n###### Six ##", '<h4 class="level-1">One</h4><h6 class="level-6">Six</h6>'),
        ("#no heading", "<p>#no heading</p>"),
        ("a **b *c* d** `e*f*`", "<p>a <strong>b <em>c</em> d</strong> <code>e*f*</code></p>"),
        ("***both*** ~~gone~~ __x__ _y_", "<p><em><strong>both</strong></em> <s>gone</s> <strong>x</strong> <em>y</em></p>"),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("**open and `open", "<p>**open and `open</p>"),
        (r"\*not\* `` a`b ``", "<p>*not* <code>a`b</code></p>"),
        ("- a\n- b\n  - c\n\n  more\n* d", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul><p>more</p></li></ul><ul><li><p>d</p></li></ul>"),
        ("3. a\n4. b\n  - c\n5. d", '<ol start="3"><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ol>'),
        ("- [ ] a\n- [x] b", "<ul><li><p>☐ a</p></li><li><p>☑ b</p></li></ul>"),
        ("born in\n1984. A year", "<p>born in\n1984. A year</p>"),
        ("> a\nlazy\n> > b\n\nc", "<blockquote><p>a\nlazy</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("a\n***\nb\n---\nc", "<p>a</p><hr><p>b</p><hr><p>c</p>"),
        ("[a *b*](https://x.example/p_(q)?r=1 'title')", '<p><a href="https://x.example/p_(q)?r=1" title="https://x.example/p_(q)?r=1">a <em>b</em></a></p>'),
        ("see https://x.example/a_b, <mailto:a@b.c>", '<p>see <a href="https://x.example/a_b" title="https://x.example/a_b">https://x.example/a_b</a>, <a href="mailto:a@b.c" title="mailto:a@b.c">mailto:a@b.c</a></p>'),
        ("![a cat](https://x.example/cat.png)", '<p><a href="https://x.example/cat.png" title="https://x.example/cat.png">Image: a cat</a></p>'),
    ],
)  # fmt: skip
def test_what_a_text_becomes(run: Run, text: str, html: str) -> None:
    assert drawn(run, text) == html


def test_tables_and_code(run: Run) -> None:
    html = drawn(run, "Costs:\n| a | b\\|c |\n|:-:|--:|\n| `x` | 1<br>2 |\n\nplain\n\n| no | table\nat all")
    assert "<p>Costs:</p>" in html
    assert '<thead><tr><th class="center">a</th><th class="right">b|c</th></tr></thead>' in html
    assert '<tbody><tr><td class="center"><code>x</code></td><td class="right">1<br>2</td></tr></tbody>' in html
    assert html.endswith("<p>plain</p><p>| no | table\nat all</p>")
    html = drawn(
        run, "1. so:\n   ```python title\n   if a:\n       pass  # 'x'\n   ```\n   done\n\n~~~\n```\n\n*a*\n~~~~\nend"
    )
    assert "<span>python</span>" in html
    assert (
        '<code><span class="hljs-keyword">if</span> a:\n    <span class="hljs-keyword">pass</span>  <span class="hljs-comment"># \'x\'</span></code>'
        in html
    )
    assert "<p>done</p></li></ol>" in html
    assert html.endswith("<code>```\n\n*a*</code></pre></div><p>end</p>")
    assert drawn(run, "```js\nlet a\n").endswith('<code><span class="hljs-keyword">let</span> a</code></pre></div>')


FORMULAS = [
    (r"Let $x^2$ be, \(y\) too", 2),
    ("$$x$$\nand\n$$\na\n+ b\n= c\n$$\n\\[\nz\n\\]\nend", 3),
    ("- so\n  $$\n  x\n  $$\n- and \\[y\\]", 2),
    ("| a |\n|---|\n| $x$ |", 1),
    ("a $5 and $6, or $5, $6; US$5$x, 5$ and 6$, $20 for one or 30$, $HOME:$PATH", 0),
    ("`$x$` \\$x\\$ ``a $y$`` $", 0),
    ("```\n$$\nx\n$$\n```", 0),
    ("$$\nnever closed\n\nand *on*", 0),
    ("\\(never closed, and *on*", 0),
    (r"$\frac{a}{$ and $\nope$ and $" + "{" * 500 + "$", 0),
    (r"$\href{javascript:alert(1)}{x}$ $\includegraphics{https://evil.example/a.png}$ $\htmlStyle{color:red}{x}$", 3),
    (r"$\rule{9999em}{9999em}$ $\def\a{\a\a}\a$", 1),
]
DRAWN = (
    DRAW.replace("RESULT", "draw(text, step)")
    .replace(
        "return texts.map",
        """const show = (root) => {
    document.body.append(root);
    const { width, height } = root.getBoundingClientRect();
    const found = { math: root.querySelectorAll(".katex").length, width, height, text: root.textContent, links: root.querySelectorAll("a, img").length };
    root.remove();
    return found;
  };
  return texts.map""",
    )
    .replace("=> draw(text, step))", "=> show(draw(text, step)))")
)


@pytest.mark.parametrize(("text", "number"), FORMULAS)
def test_formulas_are_drawn_and_prices_and_code_stay_text(run: Run, text: str, number: int) -> None:
    [[whole, in_pieces, in_letters]] = run(DRAWN, [[text], [10**6, 3, 1]])
    assert whole == in_pieces == in_letters
    assert whole["math"] == number
    assert whole["links"] == 0
    assert whole["height"] < 2000
    if not number:
        assert "$" in whole["text"] or "(" in whole["text"], "the source is shown"


def test_a_half_formula_is_shown_as_its_source(run: Run) -> None:
    """What follows an open mark is not formatted, so that nothing changes its look twice."""
    found = run(
        """async ([text]) => {
          const { Markdown } = await import("./page/markdown.js");
          const root = document.createElement("div");
          const markdown = new Markdown(root);
          return [...text].map((letter) => {
            markdown.write(letter);
            markdown.render();
            return root.querySelectorAll("em, a, code").length;
          });
        }""",
        [r"see \(a *b* [c](https://d.example)\) "],
    )
    assert set(found) == {0}


def test_what_is_drawn_stays_while_its_block_grows(run: Run) -> None:
    """A button that is pressed, or text that is selected, is not replaced by an equal one."""
    kept = run(
        """async () => {
          const { Markdown } = await import("./page/markdown.js");
          const root = document.createElement("div");
          const markdown = new Markdown(root);
          const write = (text) => { markdown.write(text); markdown.render(); };
          write("1. so:\\n   ```js\\n   let a\\n   ```\\n   and ");
          const first = [root.querySelector(".code button"), root.querySelector("code span")];
          write("*more*\\n\\n   - a\\n   - b\\n");
          write("2. then\\n\\nend");
          markdown.end();
          return [root.querySelectorAll("li").length, ...first.map((node) => root.contains(node))];
        }"""
    )
    assert kept == [4, True, True]


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=https://evil.example/x onerror=alert(1)>",
    "<svg/onload=alert(1)><iframe srcdoc='<script>alert(1)</script>'>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java\tscript:alert(1)) [d](vbscript:x) [e](data:text/html,x)",
    "<javascript:alert(1)> [f](file:///etc/passwd) [g](//evil.example/x) [h](blob:https://x.example/1)",
    "![x](https://evil.example/pixel.png)",
    "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>",
    "```html\n<img src=x onerror=alert(1)><script>alert(1)</script>\n```\n``` \"onmouseover=alert(1)\nx\n```",
    "[![x](https://evil.example/p.png)](javascript:alert(1)) <https://a.example/\"onmouseover=\"alert(1)>",
    "[x](https://a.example/\"onmouseover=\"alert(1))",
    "| <b>a</b> | b |\n|---|---|\n| <img src=x> | [x](javascript:1) |",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_markup_stays_text(run: Run, text: str) -> None:
    found = run(
        """async (text) => {
          const { Markdown } = await import("./page/markdown.js");
          const root = document.createElement("div");
          document.body.append(root);
          const markdown = new Markdown(root);
          markdown.write(text);
          markdown.end();
          const elements = [...root.querySelectorAll("*")];
          const allowed = new Set(["href", "title", "target", "rel", "dir", "class", "tabindex", "aria-label", "type", "role", "start"]);
          return {
            tags: elements.map((each) => each.localName),
            attributes: elements.flatMap((each) => each.getAttributeNames()).filter((name) => !allowed.has(name)),
            protocols: [...root.querySelectorAll("a")].map((each) => each.protocol),
          };
        }""",
        text,
    )
    assert {"script", "img", "iframe", "style", "b"}.isdisjoint(found["tags"])
    assert set(found["attributes"]) <= {"aria-hidden"}
    assert set(found["protocols"]) <= {"http:", "https:", "mailto:"}


def test_characters_that_reorder_text_are_shown_as_such(run: Run) -> None:
    assert "\u202e" not in drawn(run, "a \u202ereversed `b\u2066c`\n```\n\u202edoc\n```")


def test_a_text_looks_alike_however_it_arrives(run: Run) -> None:
    random_ = random.Random(7)
    pieces = ["*", "**", "_", "`", "```", "```py\n", "\n", "\n\n", "  ", "    ", "- ", "1. ", "> ", "# ", "| ", "|---|---|\n",
              "[", "](", "https://a.example", ")", "!", "word", "two words", "<br>", "~~", "\\", "---\n", "12", "\t",
              "$", "$$", "\\(", "\\)", "\\[", "\\]", "$$\n"]  # fmt: skip
    texts = ["".join(random_.choices(pieces, k=random_.randint(1, 40))) for _ in range(120)]
    texts.append("1. a\n2. | b\n|---|---|\n3. c")  # an item that by itself would be a table
    for text, (whole, *others) in zip(texts, run(HTML, [texts, [10**6, 1, 2, 5]]), strict=True):
        assert others == [whole] * 3, repr(text)


@pytest.mark.parametrize(
    "unit",
    [*("word ", "`a` ", "**b** ", "- item\n", "> ", "- ", "[", "](", "*a ", "*", "`", "``a`", "| a ", "# h\n", "line\n"),
     *("```\n", "![", "<", "\\", "1. ", "a_", "https://a.example ", "[a](https://b.example) ", "~", "|", "\u202e"),
     *("$a$ ", "$", "$$", "$$\n", "$$\nx\n", "\\(", "\\(a\\) ", "\\[\n", "$a")],
)  # fmt: skip
def test_the_cost_of_an_answer_grows_with_its_length_alone(run: Run, unit: str) -> None:
    """6,400 characters, drawn every 40: at most 40 times the work of drawing them once, where drawing all takes 80."""
    [[work]] = run(WORK, [[(unit * 6400)[:6400]], [40]])
    assert work < 40 * 6400
