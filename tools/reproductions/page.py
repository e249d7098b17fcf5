"""The text of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from fedfleet.tune.units import in_words, is_share

from .claims import NOT_TRIED, VERDICTS, Study, compared, seeds_of, signed, verdict
from .inputs import RESULTS, NotRun, Paper, Studies, papers, studies
from .measured import SUMMARIES, Run, measured, provenance

PAGE = RESULTS / "README.md"

MADE = "<!-- Made by `python -m tools.reproductions` from the cells of these folders; changes are lost. -->"

READING = """\
Every number below is computed from the `cells.jsonl` of a folder here, or printed in a paper, by
`python -m tools.reproductions`; a test compares this page with what the command writes. Accuracies and AUC are in per
cent; of other metrics lower is better. A run has three summaries: its last evaluation, the mean of its last five
evaluations, and its best evaluation, which is better the more evaluations there are. ± is the standard deviation over
seeds, and the 95 % interval that of the mean of the last evaluations, by Student's t; one seed has neither. Settings
were tuned on the test set that is reported, unless a study says otherwise. Seconds are those of a run's rounds on a
machine that had other work. The commit is that of the sources which computed a row, and is one of this repository.
The [last section](#where-the-numbers-come-from) has the processor, the threads, the versions and the data of every
study."""

CLAIMS = """\
A claim is reproduced if its criterion holds for the cells. An order counts if the methods are apart by the margin in
all three summaries; if they are not, and the opposite does not hold either, it is a tie. Of several pairs of methods
the one that holds least is shown. On 10,000 test images an accuracy near 90 % has a standard error of 0.3 points,
whence the margin of 0.5. The criteria were written when the first results were known."""

CELLS = """\
Folders have a `study.yaml`, from which `fedfleet study` runs the study again, a report, and `cells.jsonl`, from which
the study can be continued or reported again on any machine. Earlier versions did not record the file of the digits."""


def page() -> str:
    listed, known = studies(), papers()
    tried = found(listed, known)
    parts = [
        "# Reproductions",
        MADE,
        f"{coverage(tried.values(), known)}\n\n{READING}",
        f"## Claims\n\n{CLAIMS}\n\n{claims(known, tried)}",
        *(section(study) for study in tried.values()),
        f"## Not run\n\n{not_run(listed.not_run, known)}",
        f"## Where the numbers come from\n\n{CELLS}\n\n{sources(tried)}",
    ]
    return "\n\n".join(parts) + "\n"


def found(listed: Studies, known: Mapping[str, Paper]) -> dict[str, Study]:
    """Folder -> study."""
    pairs = ((one, measured(RESULTS / one.folder)) for one in listed.studies)
    return {one.folder: Study(one, made, known.get(one.paper or "")) for one, made in pairs}


def coverage(some: Iterable[Study], known: Mapping[str, Paper]) -> str:
    """How many of the published numbers were measured."""
    published = {
        (paper.paper, table.table, column, row)
        for paper in known.values()
        for table in paper.tables
        for column in table.columns
        for row in table.rows
    }
    pairs = [(study, one) for study in some if study.paper for one in compared(study) if one.full]
    ours = {(study.paper.paper, *one.place) for study, one in pairs if study.paper}
    assert ours <= published
    counts = sorted({len(study.measured.study.seeds) for study, _ in pairs})
    seeds = ", with one seed" if counts == [1] else f", with {' or '.join(map(str, counts))} seeds" if counts else ""
    return (
        f"Of the {len(published)} accuracies that the {len(known)} papers print, {len(ours)} were measured here at the "
        f"paper's number of rounds{seeds}."
    )


# --- tables -----------------------------------------------------------------------------------------------------------
def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(text or ' ' for text in line)} |" for line in lines)


def claims(known: Mapping[str, Paper], some: Mapping[str, Study]) -> str:
    """A sentence with the number of each verdict, and a table for each paper."""
    parts, verdicts = [], []
    for paper in known.values():
        rows = []
        for claim in paper.claims:
            decided = verdict(claim, some)
            verdicts.append(decided.verdict)
            told = f"**{decided.verdict}**" if decided.verdict != NOT_TRIED else decided.verdict
            folder = f"[`{claim.folder}`]({claim.folder}/report.md)" if claim.folder else ""
            cells = (seeds_of(claim, some), decided.evidence, decided.criterion, folder)
            rows.append((claim.says, told, *cells, claim.remark))
        heads = ("claim", "verdict", "seeds", "the cells say", "criterion", "study", "remark")
        parts.append(f"### {paper.paper}\n\n{table(heads, rows)}")
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
    return "\n\n".join([f"{len(verdicts)} claims: {counts}.", *parts])


def section(study: Study) -> str:
    """A study: its table and what a reader has to know of it."""
    listed, made = study.listed, study.measured
    unit = in_words(made.study.report.metric, made.evaluated).removeprefix("test ")
    about = [f"Command: `{listed.command}`; [the report]({listed.folder}/report.md).", listed.what]
    about += [f"In part: {text}." for text in dict.fromkeys(line.get("in_part", "") for line in made.lines) if text]
    about.append(f"Settings were chosen {made.tuning}." if made.trials else "This study tuned nothing.")
    if published := bool(compared(study)):
        about.append(f"The difference is that of the {made.reported} from the published number.")
    rows = [
        [*row(study, method, level, published), ", ".join(dict.fromkeys(f"`{run.commit[:12]}`" for run in runs))]
        for (method, level), runs in made.rows.items()
    ]
    heads = ["method", "level", "seeds", *(["published"] if published else []), f"{unit}: last evaluation"]
    heads += ["95 % interval", "mean of the last 5", "best", "in round", *(["difference"] if published else [])]
    heads += ["settings", "MB up", "seconds", "commit"]
    charts = [f"![{what}]({listed.folder}/{file})" for file, what in listed.charts.items()]
    notes = ["\n".join(f"- {note}" for note in listed.notes)] if listed.notes else []
    text = " ".join(filter(None, about))
    return "\n\n".join([f"## {listed.title}", text, table(heads, rows), *notes, *charts])


def row(study: Study, method: str, level: str, published: bool) -> list[str]:
    runs = study.measured.rows[method, level]
    done = [run for run in runs if run.values]
    seeds = f"{len(done)} of {len(runs)}" if len(done) < len(runs) else str(len(runs))
    last, five, best = ([run.values[name] for run in done] for name in SUMMARIES)
    form = ".2f" if is_share(study.measured.study.report.metric) else ".3g"
    texts = [method, level if level != "all" else "", seeds]
    beside = next((one for one in compared(study) if (one.method, one.level) == (method, level)), None)
    if published:
        texts.append(f"{beside.published:.1f}" if beside else "")
    texts += [mean_and_std(last, form), t_interval(last, form), mean_and_std(five, form), mean_and_std(best, form)]
    texts.append(" / ".join(str(run.best_round) for run in done))
    if published:
        texts.append(signed(beside.difference) if beside else "")
    return [*texts, settings(runs), mean_of(done, "megabytes"), mean_of(done, "seconds")]


def settings(runs: list[Run]) -> str:
    """The chosen settings, one text for all seeds if they are the same."""
    return " / ".join(dict.fromkeys(run.chosen for run in runs))


def mean_of(runs: list[Run], name: str) -> str:
    return f"{sum(getattr(run, name) for run in runs) / len(runs):,.0f}" if runs else "–"


def mean_and_std(values: list[float], form: str = ".2f") -> str:
    """Mean ± sample standard deviation, which one value does not have."""
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:{form}}"
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:{form}} ± {std:{form}}"


def t_interval(values: list[float], form: str = ".2f") -> str:
    """The 95 % confidence interval of the mean, by Student's t."""
    from scipy import stats

    if len(values) < 2:
        return "–"
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return f"{mean - half:{form}} … {mean + half:{form}}"


def not_run(some: Iterable[NotRun], known: Mapping[str, Paper]) -> str:
    rows = [
        (known[one.paper].paper, one.what, ", ".join(f"`fedfleet study {name}`" for name in one.studies))
        for one in some
    ]
    return table(("paper", "figure or table", "study"), rows)


def sources(some: Mapping[str, Study]) -> str:
    return "\n\n".join("\n".join(source(folder, study)) for folder, study in some.items())


def source(folder: str, study: Study) -> Iterator[str]:
    """A list of what the cells of a study record of their origin."""
    made = study.measured
    runs = [run for those in made.rows.values() for run in those]
    cells = [line for line in made.lines if "key" in line]
    hours = sum(line["result"].get("seconds", 0.0) for line in cells) / 3600
    yield f"- `{folder}`: `{study.listed.command}`"
    trials = f" and {made.trials} trials" if made.trials else ""
    yield f"    - {len(runs)} cells{trials}, {len(cells)} different runs, {hours:.1f} h of rounds"
    for what, text in provenance(made.lines):
        yield f"    - {what}: {text}"
