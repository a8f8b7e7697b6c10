"""How measurements are written: tables for a terminal, JSON, CSV and a plot.

A row is a dictionary: file, temperature, method and what it drafts, then the fields of `figures.Figures` and
`figures.RoundFigures`.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from eagle_jax.figures import figures, round_figures
from eagle_jax.files import replacing
from eagle_jax.measure import Sample
from eagle_jax.round_times import RoundTimes

if TYPE_CHECKING:  # it needs what training needs
    from eagle_jax.evaluation import Evaluation

Row = dict[str, Any]
Samples = dict[tuple[str, float], list[Sample]]  # by file and temperature
Rounds = dict[tuple[str, float, str], list[RoundTimes]]  # by file, temperature and method, where they were timed
MEAN = "mean over files"  # in place of a file's name
LEVELS_SHOWN = 6  # in a terminal


def rows(samples: Samples, drafting: Mapping[str, str], rounds: Rounds) -> list[Row]:
    """A row for each file, temperature and way; `drafting` says of each way what it drafts."""
    found = []
    for (file, temperature), some in samples.items():
        for way, drafts in drafting.items():
            own, plain = ([sample for sample in some if sample.way == name] for name in (way, "plain"))
            labels = {"file": file, "temperature": temperature, "method": way, "drafting": drafts}
            of_rounds = round_figures(rounds.get((file, temperature, way), []))
            found.append(labels | dataclasses.asdict(figures(own, plain)) | dataclasses.asdict(of_rounds))
    return found


def record(
    settings: dict[str, Any], samples: Samples, drafting: Mapping[str, str], rounds: Rounds, complete: bool
) -> dict[str, Any]:
    """All that is known: settings, rows, and the counts and seconds of every decoding."""
    raw = [
        {
            "file": file,
            "temperature": temperature,
            "method": sample.way,
            "group": sample.group,
            "tokens": [len(ids) for ids in sample.timed.ids],
            "rounds": len(sample.timed.accepted),
            "early": sample.timed.early,
            "prefill_seconds": sample.timed.prefill,
            "decoding_seconds": sample.timed.decoding,
            "compiling_seconds": sample.compiling,
            "gaps": None if sample.differences is None else [one.gap for one in sample.differences],
        }
        for (file, temperature), some in samples.items()
        for sample in some
    ]
    timed = [
        {"file": file, "temperature": temperature, "method": way, "rounds": [one._asdict() for one in times]}
        for (file, temperature, way), times in rounds.items()
    ]
    of_files = rows(samples, drafting, rounds)
    return {"complete": complete, "settings": settings, "rows": of_files, "samples": raw, "round_times": timed}


def mean_rows(of_files: Sequence[Row]) -> list[Row]:
    """One row a temperature and method: tau, speeds and ratio averaged over files, counts and seconds summed."""
    averaged = ("tau", "tokens_per_second", "tokens_per_second_with_prefill", "ratio")
    summed = ("texts", "tokens", "prefill_seconds", "decoding_seconds", "compiling_seconds", "identical", "excused")
    found: dict[tuple[float, str], list[Row]] = {}
    for one in of_files:
        found.setdefault((one["temperature"], one["method"]), []).append(one)
    means = []
    for group in found.values():
        mean = {key: group[0][key] for key in ("temperature", "method", "drafting")} | {"file": MEAN}
        mean |= {key: float(np.mean([one[key] for one in group])) for key in averaged}
        mean |= {key: None if group[0][key] is None else sum(one[key] for one in group) for key in summed}
        means.append(mean)
    return means


def tables(of_files: Sequence[Row]) -> list[Table]:
    """Speed and acceptance for each file and temperature; means for each temperature where there are several files."""
    cells: dict[str, list[Row]] = {}
    means = mean_rows(of_files) if len({one["file"] for one in of_files}) > 1 else []
    for one in [*of_files, *means]:
        cells.setdefault(f"{one['file']}, temperature {one['temperature']:g}", []).append(one)
    found = []
    for title, some in cells.items():
        found.append(_speeds(title, some))
        if some[0]["file"] != MEAN:
            found.append(_acceptance(some))
            if any(one["verify_seconds"] is not None for one in some):
                found.append(_round(some))
    return found


SPEED_COLUMNS = ("tau", "tokens/s", "with\nprefill", "ratio", "95 %", "same\ntext", "prefill\ns", "compile\ns")


def _speeds(title: str, some: Sequence[Row]) -> Table:
    table = _table(title, SPEED_COLUMNS)
    for one in some:
        same = "" if one["identical"] is None else f"{one['identical']}/{one['texts']}"
        table.add_row(
            one["method"],
            f"{one['tau']:.2f}",
            f"{one['tokens_per_second']:.1f}",
            f"{one['tokens_per_second_with_prefill']:.1f}",
            f"{one['ratio']:.2f}",
            f"{one['ratio_low']:.2f}-{one['ratio_high']:.2f}" if "ratio_low" in one else "",
            f"{same} ({one['excused']})" if one["excused"] else same,
            f"{one['prefill_seconds']:.2f}",
            f"{one['compiling_seconds']:.1f}",
        )
    return table


def _acceptance(some: Sequence[Row]) -> Table:
    shown = min(max(len(one["accepted_at_level"]) for one in some), LEVELS_SHOWN)
    table = _table("", ["accepted 1", *map(str, range(2, shown + 1))])
    for one in some:
        cells = _levels(one["accepted_at_level"], one["accepted_given_previous"])[:shown]
        if cells:
            table.add_row(one["method"], *cells)
    return table


def _round(some: Sequence[Row]) -> Table:
    table = _table("", ("tau", "draft\nms", "verify\nms", "forwards\nms", "draft /\nforwards"))
    for one in some:
        if one["verify_seconds"] is None:
            continue
        seconds = (one[f"{name}_seconds"] for name in ("draft", "verify", "forwards"))
        cells = ("" if each is None else f"{1e3 * each:.1f}" for each in seconds)
        ratio = one["draft_over_forwards"]
        table.add_row(one["method"], f"{one['tau']:.2f}", *cells, "" if ratio is None else f"{ratio:.2f}")
    return table


def _levels(shares: Sequence[float], given_previous: Sequence[float]) -> list[str]:
    return [f"{share:.2f}/{given:.2f}" for share, given in zip(shares, given_previous, strict=True)]


def _table(title: str, columns: Sequence[str], first: str = "method") -> Table:
    # What is in a title is no markup: a file's name may hold brackets.
    table = Table(title=title.replace("[", r"\["), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


# --- One head ---------------------------------------------------------------------------------------------------------


def evaluation_tables(title: str, found: "Evaluation") -> list[Table]:
    """Acceptance of trees and chains, and calibration."""
    cells = _levels(found.accepted_at_level, found.accepted_given_previous)[:LEVELS_SHOWN]
    trees = _table(title, ["tau", "rounds", *(f"accepted {level}" for level in range(1, len(cells) + 1))])
    trees.add_row("trees", f"{found.tau:.2f}", str(found.rounds), *cells)
    chains = _table("", ["tau", *(f"{place.predicted}-alpha" for place in found.chain)])
    chains.add_row("chains", f"{found.chain_tau:.2f}", *(f"{place.alpha:.2f}" for place in found.chain))
    shown = [one for one in found.calibration if one.nodes]
    bins = _table("", [f"{one.low:.1f}-{one.high:.1f}" for one in shown], first="confidence")
    bins.add_row("mean", *(f"{one.confidence:.2f}" for one in shown))
    bins.add_row("accepted", *(f"{one.accepted:.2f}" for one in shown))
    bins.add_row("nodes", *(str(one.nodes) for one in shown))
    bins.caption, bins.caption_justify = f"calibration error {found.calibration_error:.3f}", "left"
    return [trees, chains, bins]


def evaluation_record(found: "Evaluation") -> Row:
    """All figures, for JSON."""
    record = dataclasses.asdict(found)
    for place, fields in zip(found.chain, record["chain"], strict=True):
        fields["alpha"] = place.alpha
    return record


def accuracy_line(file: str, found: Mapping[str, float]) -> str:
    return f"{file}: top-1 {found['top1']:.1%}, top-3 {found['top3']:.1%} of {found['pairs']:.0f} pairs"


# --- Files ------------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file at once, so that a reader never sees half of one; numbers that are none become null."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(path: Path, of_files: Sequence[Row], settings: dict[str, Any]) -> None:
    """A line a row, each with all settings; lists are separated by spaces."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*of_files[0], *settings])
        writer.writeheader()
        for one in of_files:
            writer.writerow({key: _cell(value) for key, value in (one | settings).items()})


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def plot(path: Path, of_files: Sequence[Row]) -> None:
    """Ratio and tau by method, and acceptance by position, one colour a method, as a PNG.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            'A plot needs matplotlib, which is not installed; pip install "eagle_jax[plots]".'
        ) from error
    cells = list(dict.fromkeys((one["file"], one["temperature"]) for one in of_files))
    methods = list(dict.fromkeys(one["method"] for one in of_files))
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    ratio, tau, position = figure.subplots(1, 3)
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        own = {(one["file"], one["temperature"]): one for one in of_files if one["method"] == method}
        places = [
            place + (index - (len(methods) - 1) / 2) * width for place in range(len(cells)) if cells[place] in own
        ]
        for axes, key in ((ratio, "ratio"), (tau, "tau")):
            axes.bar(places, [one[key] for one in own.values()], width, label=method, color=f"C{index}")
        for one in own.values():
            shares, style = one["accepted_at_level"], "--" if one["temperature"] else "-"
            position.plot(range(1, len(shares) + 1), shares, style, marker=".", alpha=0.7, color=f"C{index}")
    for axes, title in ((ratio, "tokens/s, relative to plain"), (tau, "tau: tokens a round")):
        axes.axhline(1, color="black", linewidth=0.8)
        labels = [f"{file}\nT {temperature:g}" for file, temperature in cells]
        axes.set_xticks(range(len(cells)), labels, fontsize="small")
        axes.set_title(title)
    position.set(title="share of rounds that accept so many drafts", ylim=(0, 1))
    position.set_xticks(range(1, max(2, *(len(one["accepted_at_level"]) + 1 for one in of_files))))
    figure.legend(*ratio.get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
    figure.savefig(path, dpi=120)
