"""The hit rates as a bar chart in SVG: a few shapes, for which no plotting library is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from xml.etree import ElementTree

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 700, 50, 310
BAR = 46
TITLE = "tokens restored, of those that a store without a cap restores; caps in working sets"
COLOURS = ("#2a6f97", "#e09f3e", "#9e9e9e")


def bars(groups: Sequence[str], rates: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """An SVG document: for each group a bar for each name, as high as the mean of its rates (0 to
    1), and a line from the least to the greatest."""
    svg = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        attrib={"font-family": "sans-serif", "font-size": "13"},
    )
    _shape(svg, "rect", width=WIDTH, height=HEIGHT, fill="white")
    _text(svg, LEFT, 22, TITLE)
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        _shape(svg, "line", x1=LEFT, x2=RIGHT, y1=y, y2=y, stroke="#dddddd")
        _text(svg, LEFT - 8, y + 4, f"{percent} %", "end")
    step = (RIGHT - LEFT) / len(groups)
    for number, group in enumerate(groups):
        middle = LEFT + step * (number + 0.5)
        _text(svg, middle, BOTTOM + 22, group, "middle")
        for place, (name, colour) in enumerate(zip(rates, COLOURS, strict=True)):
            x = middle + (place - len(rates) / 2) * (BAR + 6)
            _bar(svg, x, rates[name][number], colour)
    for place, (name, colour) in enumerate(zip(rates, COLOURS, strict=True)):
        x = LEFT + 150 * place
        _shape(svg, "rect", x=x, y=HEIGHT - 22, width=12, height=12, fill=colour)
        _text(svg, x + 18, HEIGHT - 11, name)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _bar(svg: ElementTree.Element, x: float, rates: Sequence[float], colour: str) -> None:
    top = _y(fmean(rates))
    _shape(svg, "rect", x=x, y=top, width=BAR, height=BOTTOM - top, fill=colour)
    middle, least, most = x + BAR / 2, _y(min(rates)), _y(max(rates))
    _shape(svg, "line", x1=middle, x2=middle, y1=most, y2=least, stroke="black")
    _text(svg, middle, most - 6, f"{100 * fmean(rates):.0f} %", "middle")


def _y(rate: float) -> float:
    return BOTTOM - rate * (BOTTOM - TOP)


def _shape(svg: ElementTree.Element, kind: str, **fields: float | str) -> None:
    words = {
        name: value if isinstance(value, str) else f"{value:g}" for name, value in fields.items()
    }
    ElementTree.SubElement(svg, kind, words)


def _text(svg: ElementTree.Element, x: float, y: float, text: str, anchor: str = "start") -> None:
    words = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    ElementTree.SubElement(svg, "text", words).text = text
