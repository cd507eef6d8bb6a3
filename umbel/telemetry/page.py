"""The HTML page of the report: style sheet, frame and tables. Knows nothing about runs.

A Python file, because HTML files do not travel in a Flower app bundle. The page carries a content security
policy that forbids scripts and every request, so that it stays a document wherever it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

_CSS = """
:root{color-scheme:light dark;--ink:#1b2330;--muted:#566173;--line:#d8dde5;--bg:#fff;--panel:#f5f7f9;
--train:#3566c8;--heldout:#bf4f17;--server:#6b4fa0;--up:#1f7f74;--down:#8cc5bd;--load:#8fa3bf;--encode:#6b4fa0;
--wait:#cfd6df;--ok:#1f7f74;--late:#e0a526;--bad:#b3262e;--fail:#7a1e4b;--gone:#4b5563;--idle:#e6eaef;
--unused:#a3aebd;--on:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--muted:#9aa6b6;--line:#333c49;--bg:#12161c;
--panel:#1a2029;--train:#7ba2f2;--heldout:#f08a54;--server:#b09be0;--up:#4fb8ab;--down:#2b6c65;--load:#6f83a0;
--encode:#b09be0;--wait:#3c4653;--ok:#3aa396;--late:#e0b04a;--bad:#e0656b;--fail:#c06393;--gone:#8b96a6;
--idle:#252c36;--unused:#566173;--on:#12161c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1000px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 6px;padding-top:14px;border-top:1px solid var(--line)}
p{margin:6px 0 10px;max-width:75ch}.muted,caption,figcaption{color:var(--muted)}.lead{font-size:17px}
.lead,.wide{max-width:none}
.pill{display:inline-block;padding:1px 10px;border-radius:99px;font-size:13px;font-weight:600;
vertical-align:middle;color:var(--on);background:var(--gone)}
.pill.completed{background:var(--ok)}.pill.failed{background:var(--bad)}.pill.running{background:var(--train)}
.warn{border-left:4px solid var(--late);background:var(--panel);padding:8px 14px;margin:12px 0}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:10px;
margin:18px 0 4px;padding:0}
.tile{background:var(--panel);border-radius:8px;padding:10px 14px}
.tile dt{font-size:13px;color:var(--muted)}.tile dd{margin:0;font-size:20px;font-weight:600;
font-variant-numeric:tabular-nums}
.tile dd small{display:block;font-size:12.5px;font-weight:400;color:var(--muted)}
figure{margin:10px 0 4px;overflow-x:auto}
svg{display:block;width:100%;min-width:540px;height:auto;font-family:inherit}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:4px 0;padding:0;list-style:none;font-size:13px}
.legend i{display:inline-block;width:13px;height:13px;border-radius:3px;margin-right:6px;vertical-align:-2px}
.grid{stroke:var(--line);stroke-width:1}.tick,.axis{fill:var(--muted);font-size:11.5px}.end{text-anchor:end}
.mid,.glyph{text-anchor:middle}.glyph{font-size:11px;font-weight:700;fill:var(--on)}.g-idle{fill:var(--muted)}
.line{fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round}.dot,.fill{fill:currentColor}
.band{fill:currentColor;opacity:.16}.c-train{color:var(--train)}.c-heldout{color:var(--heldout)}
.c-server{color:var(--server);stroke-dasharray:6 4}.c-up{color:var(--up)}.c-down{color:var(--down)}
.c-load{color:var(--load)}.c-eval{color:var(--heldout)}.c-encode{color:var(--encode)}.c-wait{color:var(--wait)}
.legend i{background:currentColor}.legend i.band{opacity:.3}
.s-accepted{fill:var(--ok);color:var(--ok)}.s-late{fill:var(--late);color:var(--late)}
.s-unused{fill:var(--unused);color:var(--unused)}.s-rejected{fill:var(--bad);color:var(--bad)}
.s-failed{fill:var(--fail);color:var(--fail)}.s-missing{fill:var(--gone);color:var(--gone)}
.s-waiting{fill:var(--load);color:var(--load)}.s-idle{fill:var(--idle);color:var(--idle)}
nav ul{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;margin:14px 0 0;padding:0;font-size:13.5px}
nav a{color:var(--muted);text-underline-offset:3px}nav a:focus-visible,nav a:hover{color:var(--ink)}
nav a:focus-visible{outline:2px solid var(--train);outline-offset:2px}
.spark{width:120px;min-width:120px;height:24px}.spark .line{stroke-width:1.6}
.c-exact{color:var(--encode)}.c-residual{color:var(--up)}
.scroll{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
caption{text-align:left;font-size:13px;padding:2px 0 6px}
th,td{padding:4px 10px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
thead th{font-weight:600;color:var(--muted);vertical-align:bottom}tbody th{font-weight:600}
td,tbody th{overflow-wrap:break-word}td{min-width:3.5em}
th.num,td.num{text-align:right;min-width:0}tbody .num{white-space:nowrap}
details{margin:8px 0}summary{cursor:pointer;color:var(--muted);font-size:13.5px}
summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--train);outline-offset:2px}
pre{background:var(--panel);border-radius:8px;padding:12px 14px;overflow-x:auto;font-size:12.5px;margin:8px 0}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:12px}
.answers h3{font-size:13px;color:var(--muted);margin:0 0 2px}
.answers pre,.prompt{white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin-top:48px;font-size:13px;color:var(--muted)}
@media (max-width:640px){.tiles{grid-template-columns:repeat(2,1fr)}main{padding:18px 14px 40px}}
@media print{:root{color-scheme:light;--ink:#000;--muted:#444;--line:#ccc;--bg:#fff;--panel:#f5f7f9;
--train:#3566c8;--heldout:#bf4f17;--server:#6b4fa0;--up:#1f7f74;--down:#8cc5bd;--load:#8fa3bf;--encode:#6b4fa0;
--wait:#cfd6df;--ok:#1f7f74;--late:#e0a526;--bad:#b3262e;--fail:#7a1e4b;--gone:#4b5563;--idle:#e6eaef;
--unused:#a3aebd;--on:#fff}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
nav{display:none}body{font-size:11pt}main{max-width:none;padding:0}h2{break-after:avoid}figure,tr,.tile{break-inside:avoid}
.scroll,figure,pre{overflow:visible}svg{min-width:0}pre{white-space:pre-wrap}
details::details-content{content-visibility:visible;block-size:auto}}
"""


class Markup(str):
    """Text that is HTML already; everything else is escaped."""


_HEADING = re.compile(r'<h2 id="([\w-]+)">(.*?)</h2>')
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document; `sections` are HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(s for s in sections if s)
        + "\n</main>\n</body>\n</html>\n"
    )


def heading(title: str, outcome: str, facts: str, lead: str) -> str:
    """The first heading with the outcome as a mark beside it, the facts and the verdict below."""
    mark = f'<span class="pill {escape(outcome)}">{escape(outcome)}</span>'
    return f"<h1>{escape(title)} {mark}</h1>{paragraph(facts, 'muted')}{paragraph(lead, 'lead')}"


def section(ident: str, title: str, *parts: str) -> str:
    """A headed section; empty when it has no content."""
    body = "\n".join(p for p in parts if p)
    if not body:
        return ""
    return f'<section aria-labelledby="{ident}">\n<h2 id="{ident}">{escape(title)}</h2>\n{body}\n</section>'


def contents(sections: Sequence[str]) -> str:
    """Links to the sections of the page, in order: the first stop of a keyboard."""
    found = [part for text in sections for part in _HEADING.findall(text)]
    links = "".join(f'<li><a href="#{ident}">{title}</a></li>' for ident, title in found)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>' if len(found) > 2 else ""


def paragraph(text: str, css: str = "") -> str:
    return f'<p class="{css}">{escape(text)}</p>' if css else f"<p>{escape(text)}</p>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(label, CSS class) entries with a colour patch."""
    found = "".join(
        f'<li><i class="{css}" aria-hidden="true"></i>{escape(label)}</li>' for label, css in entries
    )
    return f'<ul class="legend">{found}</ul>'


def figure(svg: str, entries: Sequence[tuple[str, str]]) -> str:
    return f"<figure>{legend(entries)}{svg}</figure>" if svg else ""


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """(name, value, note) facts in large print."""
    found = ""
    for name, value, note in entries:
        small = f"<small>{escape(note)}</small>" if note else ""
        found += f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>'
    return f'<dl class="tiles">{found}</dl>'


def table(
    caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()
) -> str:
    """A table of text cells; the first cell of a row is its heading, columns in `numeric` align right."""
    if not rows:
        return ""

    def cell(tag: str, index: int, text: str, scope: str = "") -> str:
        css = ' class="num"' if index in numeric else ""
        return f"<{tag}{scope}{css}>{text if isinstance(text, Markup) else escape(text)}</{tag}>"

    head = "".join(cell("th", i, text, ' scope="col"') for i, text in enumerate(header))
    body = "\n".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, text) for i, text in enumerate(row) if i > 0)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    if not body:
        return ""
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"
