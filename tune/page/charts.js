// The behaviour of a page: charts from the JSON in #figures, legends, scales, sortable tables, light and dark.
// A chart has kind, x and y (title, log, labels, whole) and series, as content.py describes them.
(() => {
"use strict";
const { figures, styles } = JSON.parse(document.getElementById("figures").textContent);
const GRID = "rgba(128,128,128,.25)", LINE = "rgba(128,128,128,.7)";
const narrow = matchMedia("(pointer: coarse)").matches || innerWidth < 600;
const hidden = new Set();
const looks = new Map(); // section -> the reader's choices

const style = number => styles[number < 0 ? styles.length - 1 : number % (styles.length - 1)];
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const faded = colour => colour + "26";
const shown = value => value === null || value === undefined ? "–" : String(+value.toPrecision(4));

function look(section) {
  if (!looks.has(section)) {
    const pressed = [...section.querySelectorAll(".controls [aria-pressed=true]")];
    looks.set(section, Object.fromEntries(pressed.map(b => b.dataset.set ? [b.dataset.set, b.dataset.value]
      : [b.dataset.flip, true])));
  }
  return looks.get(section);
}

// At first only the axes are logarithmic that ask for it; the reader's choice is one for all charts of a section.
const isLog = (figure, chosen, name) => chosen["log " + name] === true
  && (figure[name].log || chosen["flipped log " + name] === true);

// --- traces ---------------------------------------------------------------------------------------------------------
function curves(figure, chosen) {
  const made = [];
  for (const one of figure.series) {
    if (hidden.has(one.name)) continue;
    const { colour, dash, symbol } = style(one.style), name = plain(one.name);
    const x = one.x[chosen.x] || Object.values(one.x)[0];
    const how = chosen.seeds || "band", seeds = Object.entries(one.seeds);
    if (how === "lines" && seeds.length > 1) {
      for (const [seed, y] of seeds)
        made.push({ x, y, mode: "lines", line: { color: colour, width: 1, dash }, opacity: .75, connectgaps: true,
          hovertemplate: `${name}, ${plain(seed)}<br>%{x:.5~g}: %{y:.5~g}<extra></extra>` });
      continue;
    }
    if (how === "band" && one.std.some(value => value)) {
      const edge = sign => one.mean.map((value, i) => value === null ? null : value + sign * (one.std[i] || 0));
      // On a logarithmic axis the mean minus the deviation may have no place; there the factors up and down are the same.
      const below = one.mean.map((value, i) => value > 0 ? value * value / (value + (one.std[i] || 0)) : value);
      const floor = isLog(figure, chosen, "y") ? below : edge(-1);
      const side = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      made.push({ ...side, y: floor }, { ...side, y: edge(1), fill: "tonexty", fillcolor: faded(colour) });
    }
    const marks = Math.max(1, Math.ceil(x.length / 8));
    made.push({ x, y: one.mean, mode: "lines+markers", line: { color: colour, width: 2, dash },
      marker: { color: colour, symbol, size: x.map((_, i) => i % marks && i !== x.length - 1 ? 0 : 6), opacity: 1,
        line: { width: 0 } },
      customdata: one.mean.map((_, i) => one.std[i] ? " ± " + shown(one.std[i]) : ""),
      hovertemplate: `${name}<br>%{x:.5~g}: %{y:.5~g}%{customdata}<extra></extra>` });
  }
  return made;
}

function marks(figure) {
  const made = [], dots = figure.series.filter(one => one.markers).length;
  for (const one of figure.series) {
    if (hidden.has(one.name)) continue;
    const { colour, dash, symbol } = style(one.style);
    const bars = (size, way) => size.length ? { [way]: { type: "data", array: size, color: colour, thickness: 1,
      width: 4 } } : {};
    const mode = [one.line ? "lines" : "", one.markers ? "markers" : ""].filter(Boolean).join("+") || "none";
    const text = one.texts.length ? one.texts.map(t => plain(t).replace(/\n/g, "<br>")) : undefined;
    const at = text ? "%{text}" : `${plain(one.name)}<br>%{x}: %{y:.5~g}`;
    made.push({ x: one.x, y: one.y, mode, text, ...bars(one.dx, "error_x"), ...bars(one.dy, "error_y"),
      line: { color: colour, width: one.style < 0 ? 1.5 : 2, dash },
      marker: { color: colour, symbol: one.symbol || symbol, size: one.symbol.includes("open") ? 13 : 8,
        line: { color: colour, width: one.symbol.includes("open") ? 2.5 : 0 } },
      cliponaxis: false,
      ...(one.markers && (text || dots) ? { hovertemplate: at + "<extra></extra>" } : { hoverinfo: "skip" }) });
  }
  return made;
}

function bars(figure) {
  return figure.series.filter(one => !hidden.has(one.name)).map(one => ({ type: "bar", orientation: "h", x: one.x,
    y: one.y, marker: { color: style(one.style).colour }, text: one.x.map(value => +value.toPrecision(2)),
    textposition: "outside", cliponaxis: false,
    hovertext: one.texts.map(text => plain(text).replace(/\n/g, "<br>")), hoverinfo: "text" }));
}

function stack(figure) {
  return figure.series.filter(one => !hidden.has(one.name)).map(one => ({ x: one.x, y: one.y, mode: "lines",
    stackgroup: "all", line: { width: .5, color: style(one.style).colour }, fillcolor: style(one.style).colour + "b0",
    hovertemplate: `${plain(one.name)}<br>%{x}: %{y:.4~g}<extra></extra>` }));
}

// --- layout ---------------------------------------------------------------------------------------------------------
// Ticks of a logarithmic axis: 1, 2, 5, 10, … over a short range, powers of ten over a long one.
function ticks(values) {
  const there = values.filter(value => value > 0), [low, high] = [Math.min(...there), Math.max(...there)];
  const decades = Math.log10(high / low), steps = decades < .5 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.ceil(decades / 8) || 1, made = [];
  for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power++)
    if (decades < 2.5 || power % every === 0) steps.forEach(step => made.push(step * 10 ** power));
  return made;
}
const short = value => value >= 1e5 || value < 1e-3 ? value.toExponential(0).replace("e+", "e") : String(+value.toPrecision(3));

function axis(spec, title, log, values, sideways) {
  const made = { title: { text: plain(title), standoff: 8, font: { size: 12 } }, gridcolor: GRID, linecolor: LINE,
    showline: true, zeroline: false, automargin: true, ticks: "outside", ticklen: 4, tickcolor: LINE,
    type: log && !spec.labels.length ? "log" : "linear", nticks: 7 };
  if (spec.labels.length) {
    const most = Math.max(...spec.labels.map(label => label.length));
    Object.assign(made, { tickmode: "array", tickvals: spec.labels.map((_, i) => i), ticktext: spec.labels.map(plain),
      range: [-.5, spec.labels.length - .5], tickangle: sideways && most * spec.labels.length > 34 ? -35 : 0 });
  } else if (log) {
    const tickvals = ticks(values);
    Object.assign(made, { tickmode: "array", tickvals, ticktext: tickvals.map(short) });
  } else if (spec.zero) {
    made.rangemode = "tozero";
  } else if (spec.whole) {
    made.tickformat = "~d";
    if (values.length && Math.max(...values) - Math.min(...values) <= 7) made.dtick = 1;  // else 4, 5, 5, 6, 6
  }
  return made;
}

// All numbers of a chart on an axis, x or y; those of a curve depend on the reader's choice.
const numbers = (figure, name, chosen) => figure.series.flatMap(one => figure.kind !== "curves" ? one[name]
  : name === "y" ? one.mean : one.x[chosen.x] || Object.values(one.x)[0]);

// The ends of a series on y: those of its band or its error bars, or of the single runs.
function ends(one, log, chosen) {
  if (chosen.seeds === "lines" && Object.keys(one.seeds || {}).length > 1) return Object.values(one.seeds).flat();
  const sizes = one.std || one.dy;
  return (one.mean || one.y).flatMap((value, i) => {
    const size = sizes[i] || 0;
    return value === null ? [] : [log && value > 0 ? value * value / (value + size) : value - size, value + size];
  });
}

// The range of y of all charts of a section whose reader wants the same one.
const ranges = new Map();
function range(section, log, chosen) {
  if (!ranges.has(section)) {
    const all = [...section.querySelectorAll(".plot")].map(plot => figures[plot.dataset.figure]);
    let [low, high] = [Infinity, -Infinity];
    for (const one of all.flatMap(figure => figure.series)) {
      if (hidden.has(one.name)) continue;
      for (const value of ends(one, log, chosen)) {
        if (value === null || (log && value <= 0)) continue;
        [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    ranges.set(section, low < high ? [low, high] : null);
  }
  return ranges.get(section);
}

function layout(figure, chosen, section) {
  const title = figure.kind === "curves" ? chosen.x || figure.x.title : figure.x.title;
  const log = isLog(figure, chosen, "y"), same = chosen["same y"] ? range(section, log, chosen) : null;
  const of = (name, text) => axis(figure[name], text, isLog(figure, chosen, name),
    name === "y" && same ? same : numbers(figure, name, chosen), name === "x");
  const y = of("y", figure.y.title);
  if (same) {
    const [low, high] = log ? same.map(Math.log10) : same;
    y.range = [low - .05 * (high - low), high + .05 * (high - low)];
  }
  if (figure.y.labels.length) y.range = [figure.y.labels.length - .5, -.5];
  return { xaxis: of("x", title), yaxis: y, showlegend: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 48, r: 14, t: 12, b: 44 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12 }, dragmode: narrow ? false : "zoom",
    hoverlabel: { align: "left", font: { size: 13 } } };
}

// The buttons are listed, because the library's own set has one that sends a chart to its maker's site.
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover", showTips: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
const TRACES = { curves, marks, bars, stack };

function draw(plot) {
  const figure = figures[plot.dataset.figure], chosen = look(plot.closest("section"));
  plot.dataset.drawn = "yes";
  return Plotly.react(plot, TRACES[figure.kind](figure, chosen),
    layout(figure, chosen, plot.closest("section")), CONFIG);
}

const plots = [...document.querySelectorAll(".plot")];
const redraw = within => within.forEach(plot => { if (plot.dataset.drawn) draw(plot); });
plots.forEach(plot => setTimeout(() => draw(plot))); // one after the other, so that the page answers meanwhile

// --- controls -------------------------------------------------------------------------------------------------------
const press = (button, on) => button.setAttribute("aria-pressed", String(on));
document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  ranges.clear();
  const section = button.closest("section"), { set, value, flip, series } = button.dataset;
  if (set) {
    look(section)[set] = value;
    section.querySelectorAll(`[data-set="${set}"]`).forEach(other => press(other, other === button));
    redraw(section.querySelectorAll(".plot"));
  } else if (flip) {
    const on = look(section)[flip] = !look(section)[flip];
    look(section)["flipped " + flip] = true;
    press(button, on);
    redraw(section.querySelectorAll(".plot"));
  } else if (series !== undefined) {
    const names = [...section.querySelectorAll("[data-series]")].map(other => other.dataset.series);
    const alone = event.detail === 2 || event.altKey;
    if (alone) names.forEach(name => name === series ? hidden.delete(name) : hidden.add(name));
    else if (!hidden.delete(series)) hidden.add(series);
    if (names.every(name => hidden.has(name))) names.forEach(name => hidden.delete(name));
    document.querySelectorAll("[data-series]").forEach(other => press(other, !hidden.has(other.dataset.series)));
    redraw(plots);
  }
});

// --- tables ---------------------------------------------------------------------------------------------------------
const number = text => { const found = text.replace(/,/g, "").match(/^[<×\s]*([-+]?\d*\.?\d+(e[-+]?\d+)?)/i);
  return found ? parseFloat(found[1]) : NaN; };
function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  const key = row => row.cells[at].textContent.trim();
  const order = (a, b) => {
    const [x, y] = [number(key(a)), number(key(b))];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1; // rows without a number stay at the end
    return (down ? -1 : 1) * (isNaN(x) ? key(a).localeCompare(key(b)) : x - y);
  };
  body.append(...[...body.rows].sort(order));
  table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
}
for (const table of document.querySelectorAll("table.data")) {
  if (table.tBodies[0].rows.length < 2) continue;
  for (const head of table.querySelectorAll("th")) {
    head.classList.add("sortable");
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(head); }
    });
  }
}

// --- light and dark -------------------------------------------------------------------------------------------------
const theme = document.getElementById("theme"), root = document.documentElement;
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const label = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
label();

// --- paper ----------------------------------------------------------------------------------------------------------
// The width of a chart on paper is known only to the printer: two charts fit into 180 mm beside each other.
const WIDTH = 330;
addEventListener("beforeprint", () => plots.forEach(plot => {
  const alone = plot.closest(".charts").children.length === 1;
  draw(plot);
  Plotly.relayout(plot, { width: alone ? 1.4 * WIDTH : WIDTH, height: 270 });
}));
addEventListener("afterprint", () => plots.forEach(plot => Plotly.relayout(plot, { width: null, height: null, autosize: true })));
})();
