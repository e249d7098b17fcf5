"""A report as one HTML page: no network, no script, the reader's fonts; for a desk, a phone and paper."""

from __future__ import annotations

from html import escape

from .charts import Chart, Group
from .findings import Findings
from .tables import Table, Text

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; color: #1b1b1b;
  background: #fff; margin: 0 auto; max-width: 74rem; padding: 1rem clamp(1rem, 4vw, 2.5rem) 3rem; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 1rem 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; border-top: 1px solid #ddd; padding-top: .9rem; }
p.note, p.head { color: #555; margin: .2rem 0 .8rem; max-width: 60rem; }
.reduced { background: #fff4d6; border-left: .3rem solid #e69f00; padding: .6rem .9rem; margin: .8rem 0;
  max-width: 60rem; }
.reduced ul { margin: .2rem 0 0; padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .28rem .9rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e5e5e5; }
th { border-bottom: 2px solid #999; font-weight: 600; }
td { white-space: nowrap; }
td.long { white-space: normal; min-width: 16rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: #fff; }
td.best { font-weight: 700; }
.charts { display: grid; gap: 1rem 1.6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; break-inside: avoid; }
.legend { max-width: 26rem; margin: .5rem 0 1rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif !important; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  table, figure { break-inside: avoid; }
  .scroll { overflow: visible; }
  td { white-space: normal; }
  .charts { grid-template-columns: repeat(2, 1fr); }
  @page { margin: 15mm; }
}
"""

LONG = 60
"""Characters from which a cell's text may break."""


def page(found: Findings, tables: list[Table], groups: list[Group]) -> str:
    body = [f"<h1>{escape(found.title)}</h1>", head(found), reduced(found), claims(found)]
    body += [tabled(table) for table in tables[:1]]
    body += [section(group) for group in groups]
    body += [tabled(table) for table in tables[1:]]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(found.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )


def head(found: Findings) -> str:
    said = [found.paper, *found.facts]
    return f'<p class="head">{escape("; ".join(filter(None, said)))}.</p>' if any(said) else ""


def reduced(found: Findings) -> str:
    if not found.notes:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    return f'<div class="reduced"><strong>Reduced, not the full study</strong><ul>{notes}</ul></div>'


def claims(found: Findings) -> str:
    if not found.published.claims:
        return ""
    listed = "".join(f"<li>{escape(claim)}</li>" for claim in found.published.claims)
    return f'<p class="note">What the paper shows:</p><ul class="note">{listed}</ul>'


def section(group: Group) -> str:
    charts = "\n".join(f"<figure>{labelled(chart)}</figure>" for chart in group.charts)
    legend = f'<figure class="legend">{labelled(group.legend)}</figure>' if group.legend else ""
    head = f'<h2>{escape(group.title)}</h2>\n<p class="note">{escape(group.note)}</p>\n{legend}'
    return f'<section>{head}\n<div class="charts">{charts}</div></section>'


def labelled(chart: Chart) -> str:
    """The SVG with what it shows, for those who cannot see it."""
    return chart.svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.alt)}"', 1)


def tabled(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    return (
        f'<section><h2>{escape(table.title)}</h2>\n<p class="note">{escape(table.note)}</p>\n'
        f'<div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div></section>"
    )


def cell(text: Text) -> str:
    kinds = [*(["best"] if text.best else []), *(["long"] if len(text.text) > LONG else [])]
    attribute = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<td{attribute}>{escape(text.text)}</td>"
