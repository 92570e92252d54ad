"""The page around the figures: one file, no script, no request, light and dark, phone to wide screen."""

from __future__ import annotations

from pathlib import Path

from .. import __version__
from ..files import write_atomically
from .markup import Markup, el, join

STYLE = Path(__file__).with_name("style.css")
LONG = 26  # letters of a cell that may break over lines
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, head: list, sections: list) -> str:
    """The whole document; ``head`` stands above the sections."""
    document = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", http_equiv="Content-Security-Policy", content=POLICY),
            el("link", rel="icon", href="data:,"),
            el("title", title),
            el("style", Markup(STYLE.read_text(encoding="utf-8"))),
        ),
        el(
            "body",
            el("header", el("div", "fastactrec report", class_="eyebrow"), el("h1", title), *head),
            el("main", *sections),
            el("footer", el("p", f"Written by fastactrec {__version__}.", class_="muted")),
        ),
        lang="en",
    )
    return "<!doctype html>\n" + document + "\n"


def write_page(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    write_atomically(path, text.encode("utf-8", "replace"))  # file names need not be UTF-8


def section(title: str, *children) -> Markup:
    return el("section", el("h2", title), *children)


def note(text: str) -> Markup:
    return el("p", text, class_="note", role="note")


def cards(entries: list[tuple[str, str, str]]) -> Markup:
    """Large figures: (name, value, what it was measured on)."""
    return el(
        "dl",
        [el("div", el("dt", name), el("dd", value, el("small", basis))) for name, value, basis in entries],
        class_="cards",
    )


def scroll(content: Markup, label: str, tall: bool = False) -> Markup:
    """A box that scrolls inside itself, by keyboard too."""
    css = "scroll tall" if tall else "scroll"
    return el("div", content, class_=css, tabindex=0, role="region", aria_label=label)


def table(columns: list[str], rows: list[list], *, label: str, caption: str = "", numeric=(), tall=False):
    """A table in a scrolling box; the first cell of a row is its heading.

    Args:
        label: name of the box for a screen reader. numeric: indices of columns set flush right.
        tall: give a long table a height of its own.
    """

    def cell(tag: str, index: int, content, scope: str | None = None) -> Markup:
        long = isinstance(content, str) and not isinstance(content, Markup) and len(content) > LONG
        return el(tag, content, class_="num" if index in numeric else "long" if long else None, scope=scope)

    head = el("tr", [cell("th", i, name, "col") for i, name in enumerate(columns)])
    body = [el("tr", cell("th", 0, row[0], "row"), [cell("td", i, row[i]) for i in range(1, len(row))]) for row in rows]
    content = el("table", el("thead", head), el("tbody", body))
    # the caption stays outside the scrolling box, where it can wrap on a narrow screen
    return join(el("p", caption, class_="caption") if caption else None, scroll(content, label, tall))


def figure(title: str, drawing: Markup, caption: str = "", key: Markup | None = None) -> Markup:
    return el("figure", el("h3", title), key, drawing, el("figcaption", caption) if caption else None)


def share_bar(fraction: float, text: str) -> Markup:
    """A small bar beside the number that it shows."""
    bar = el("span", el("i", style=f"width:{100 * fraction:.1f}%"), class_="bar", aria_hidden="true")
    return join(bar, text)


def color_key(entries: list[tuple[str, str]]) -> Markup:
    """Names beside their colour: (name, CSS class)."""
    items = [el("li", el("span", class_=f"swatch {css}", aria_hidden="true"), name) for name, css in entries]
    return el("ul", items, class_="legend")
