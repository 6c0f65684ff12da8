"""Elements of SVG and HTML as text, in which everything that is not an element is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

Attribute = str | int | float | None

_ELLIPSIS = "…"
_NARROW = 600


def element(name: str, *children: str, **attributes: Attribute) -> Markup:
    """``<name attribute="…">children</name>``.

    Args:
        name: of the element.
        *children: elements, or text.
        **attributes: ``class_`` is ``class``, and ``text_anchor`` is ``text-anchor``. Those that
            are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = Markup("").join(children)
    return Markup(f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>")


def text(x: float, y: float, content: str, **attributes: Attribute) -> Markup:
    """A line of text."""
    return element("text", plain(content), x=x, y=y, **attributes)


def titled(title: str, *children: str, **attributes: Attribute) -> Markup:
    """A group that says what it is when one points at it."""
    return element("g", element("title", plain(title)), *children, **attributes)


def drawing(width: float, height: float, label: str, *children: str) -> Markup:
    """A picture, which scales to the width that it is given; ``label`` is what is read out."""
    return element(
        "svg",
        element("title", plain(label)),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
    )


def is_narrow(width: float) -> bool:
    """Return whether a picture is too narrow for labels beside its bars."""
    return width < _NARROW


def plain(content: str) -> str:
    """Text without what turns its direction or cannot be seen."""
    return "".join(c if c.isprintable() else " " for c in content)


def short(name: str, most: int) -> str:
    """A name in at most so many letters: the end of a path says most."""
    return name if len(name) <= most else _ELLIPSIS + name[len(name) - most + 1 :]


def breakable(name: str) -> Markup:
    """A name that may go on in another line after a dot, rather than anywhere."""
    return Markup(".<wbr>").join(map(escape, name.split(".")))


def column(names: Iterable[str], most: int = 44) -> float:
    """Return the width in pixels of a column of names, each cut to ``most`` letters."""
    return 7.0 * min(most, max(map(len, names), default=0)) + 18


def clipped(sentence: str, most: int) -> str:
    """A sentence in at most so many letters."""
    return sentence if len(sentence) <= most else sentence[: most - 1] + _ELLIPSIS


def _number(value: Attribute) -> str:
    """A number with no more digits than a picture can show."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)
