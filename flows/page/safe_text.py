"""Makes foreign text safe to stand in the page."""

from __future__ import annotations

from html import escape


def safe(text: str) -> str:
    """Return a text for HTML, also for attributes. It can neither end its place nor garble the page.

    Characters that a browser would not show, or that turn the direction of writing, are named.
    """
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in "\n\t" else f"\\u{ord(one):04x}" for one in text)
    return escape(text)
