"""HTML and SVG built from elements, so that no text reaches the page unescaped."""

from __future__ import annotations

import html

VOID = {"meta", "link", "br", "col"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def el(name: str, /, *children, **attributes) -> Markup:
    """One element. Children that are not ``Markup`` are escaped, ``None`` is left out, lists are flattened.

    Attributes: a trailing underscore is dropped (``class_``), other underscores become hyphens, ``None`` and
    ``False`` leave the attribute out, ``True`` writes it bare.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{html.escape(_text(value), quote=True)}"')
    parts.append(">")
    if name not in VOID:
        parts += (join(*children), f"</{name}>")
    return Markup("".join(parts))


def join(*children) -> Markup:
    """Children one after the other, escaped as in ``el``."""
    return Markup("".join(_render(child) for child in children))


def _render(child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return join(*child)
    return html.escape(_text(child), quote=False)


def _text(value) -> str:
    """Floats in SVG attributes need no more than a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
