"""The equations at the head of a method's file, as LaTeX.

The heads have a plain notation that is readable in code: `y <- y - lr u,  u = beta g(y) + (1 - beta) G`. Greek names
become Greek letters, names of several letters become upright words, which are the names of the method's arguments, and
ordinary words become text. A line has up to three parts: a label ("line 10", "server"), the statements, and, after at
least four spaces, a remark.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "rho", "mu", "tau", "phi", "eta", "sigma", "kappa")
SYMBOLS = {
    "<-": r"\leftarrow ",
    "delta": r"\Delta ",
    "epsilon": r"\varepsilon ",
    "dtheta": r"d\theta ",
    "dalpha": r"d\alpha ",
    "K": "K",
    "S": "S",
    "sum": r"\textstyle\sum ",
    "max": r"\max",
    "min": r"\min",
    "sign": r"\operatorname{sign}",
    "clip": r"\operatorname{clip}",
    "mean": r"\operatorname{mean}",
    "step": r"\operatorname{step}",
    "LocalOpt": r"\operatorname{LocalOpt}",
    "BiClip": r"\operatorname{BiClip}",
    "AdamW": r"\operatorname{AdamW}",
    "Muon": r"\operatorname{Muon}",
    "<=": r"\le ",
    "(x)": r"\otimes ",
    "*": r"\cdot ",
    "~": r"\tilde{}",
    "±": r"\pm ",
}
VARIABLES = {"du", "lr", "lo", "hi"}
TOKEN = re.compile(
    r"(?P<hat>[A-Za-z]_hat\b)|(?P<tilde>[A-Za-z]~)|(?P<plus>[a-z]_i\+)|(?P<symbol><-|<=|>=|\(x\)|±)"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<power>\^\((?:[^()]*)\)|\^\w+)"
    r"|(?P<name>[A-Za-z]+(?:'s)?(?:_[A-Za-z0-9]+(?:,i)?)*\d*)|(?P<space>\s+)|(?P<other>.)"
)
LABEL = re.compile(r"^([a-z]{2,}(?: [A-Za-z]+| \d+)?) {2,}(?!<-|=)(?=\S)")
"""Words before a statement, such as "line 10", "server" or "each step", with at least two spaces behind them."""


class Line(NamedTuple):
    """`label` and `remark` are plain text, `formula` is LaTeX."""

    label: str
    formula: str
    remark: str


def latex(block: str) -> str:
    """One display for MathJax: an array with a row for each line of the block."""
    rows = [parsed(line) for line in block.splitlines() if line.strip()]
    cells = [f"{text(row.label)} & {row.formula} & {text(row.remark)}" for row in rows]
    body = r" \\[4pt] ".join(cells)
    return rf"\[\begin{{array}}{{@{{}}l@{{\quad}}l@{{\qquad}}l@{{}}}} {body} \end{{array}}\]"


def display(block: str) -> str:
    """The display inside the element that loads MathJax (docs/assets/math.js); it is HTML, not Markdown."""
    return f'<div class="arithmatex" tabindex="0" markdown="0">{html.escape(latex(block), quote=False)}</div>'


def parsed(line: str) -> Line:
    line = line.strip()
    labelled = LABEL.match(line)
    if labelled:
        line = line[labelled.end() :]
    body, _, remark = re.sub(r" {4,}", "\x00", line, count=1).partition("\x00")
    statements = re.split(r"(?<=[,;]) {2,}", re.sub(r"(\w) {2,}(?=<-)", r"\1 ", body))
    return Line(labelled[1] if labelled else "", r"\quad ".join(formula(s.strip()) for s in statements), remark.strip())


def formula(statement: str) -> str:
    """The LaTeX of a statement such as `v <- beta v + (1 - beta) delta^2`."""
    statement = re.sub(r"sqrt\(([^()]*)\)", lambda m: f"\x01{m[1]}\x02", statement)
    statement = re.sub(r"sqrt (\w)", lambda m: f"\x01{m[1]}\x02", statement)
    joined = "".join(token(m) for m in TOKEN.finditer(statement))
    return re.sub(r"\s+", " ", re.sub(r" \}\s*\\text\{ ", " ", joined)).strip()


def token(match: re.Match[str]) -> str:
    kind, raw = match.lastgroup, match[0]
    if kind == "hat":
        return rf"\hat{{{raw[0]}}}"
    if kind == "tilde":
        return rf"\tilde{{{raw[0]}}}"
    if kind == "plus":
        return rf"{raw[0]}_i^+"
    if kind == "power":
        return f"^{{{formula(raw[1:].strip('()'))}}}"
    if kind == "name":
        return name(raw)
    if raw == "\x01":
        return r"\sqrt{"
    if raw == "\x02":
        return "}"
    if kind == "other" and raw in "{}#%&_$":
        return rf"\{raw}"
    return {"`": "", '"': ""}.get(raw, SYMBOLS.get(raw, " " if kind == "space" else raw))


def name(raw: str) -> str:
    """A letter with its subscripts, a Greek letter, the name of an argument, or a word."""
    stem, *subscripts = raw.split("_")
    if raw in SYMBOLS:
        return SYMBOLS[raw]
    if len(stem) == 1 and subscripts:
        return f"{stem}_{{{','.join(subscript(s) for s in subscripts)}}}"
    if subscripts and len(subscripts[-1]) == 1:  # of a group or a client, as in lr_x
        return rf"\mathrm{{{chr(92).join([stem, *('_' + s for s in subscripts[:-1])])}}}_{{{subscripts[-1]}}}\,"
    if subscripts:
        return rf"\mathrm{{{raw.replace('_', chr(92) + '_')}}}\,"
    if counted := re.fullmatch(r"([A-Za-z]+?)(\d+)", stem):
        return f"{letter(counted[1])}_{{{counted[2]}}} " if counted[1] in GREEK or len(counted[1]) == 1 else word(stem)
    return letter(stem) if len(stem) == 1 or stem in GREEK else word(stem)


def letter(stem: str) -> str:
    return SYMBOLS.get(stem, f"\\{stem} " if stem in GREEK else stem)


def word(stem: str) -> str:
    return rf"\mathrm{{{stem}}}\," if stem in VARIABLES else rf"\text{{ {stem} }}"


def subscript(part: str) -> str:
    return ",".join(p if len(p) <= 1 or p.isdigit() else rf"\mathrm{{{p}}}" for p in part.split(","))


def text(words: str) -> str:
    r"""MathJax takes all characters of \text as they are but $, \ and braces, which no head has there."""
    plain = words.replace("<-", "←").replace("`", "")
    return rf"\small\text{{{plain}}}" if words else ""
