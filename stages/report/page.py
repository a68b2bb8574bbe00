"""Puts numbers, charts and transcripts into the page.

Values are escaped by the template, and charts escape their labels: much of it was written by a model.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.artifacts import Manifest
from stages.report.charts import Bin, Dot, Series, bin_width, dot_chart, histogram, line_chart, shown
from stages.report.numbers import Iteration, Numbers, Share

if TYPE_CHECKING:
    import polars as pl
    from markupsafe import Markup

_FIRST_METRICS = ("loss", "reward", "kl", "clip_fraction", "entropy", "grad_norm", "tokens_per_s")


def rendered(context: dict[str, Any]) -> bytes:
    """The page as one HTML file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(shown=shown, percent=percent, pretty=_pretty)
    return environment.get_template("page.html.j2").render(context).encode("utf-8", "replace")


def percent(value: float | None) -> str:
    """A share for people; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f}%"


def progress_chart(
    iterations: Sequence[Iteration], numbers: Sequence[Numbers]
) -> tuple["Markup", list[tuple[str, str]]]:
    """Pass rate with its interval, and mean reward, by iteration; and the legend, as (tone, name)."""
    xs = [iteration.number for iteration in iterations]
    passed = [n.passed for n in numbers]
    band = [(x, *share.interval) for x, share in zip(xs, passed, strict=True) if share.interval is not None]
    rate = Series("pass rate", "good", [(x, share.value) for x, share in zip(xs, passed, strict=True)], band)
    reward = Series("mean reward", "a", [(x, n.mean_reward) for x, n in zip(xs, numbers, strict=True)])
    label = "reward and pass rate by iteration"
    if not band:
        lines, legend = [reward], [("a", "mean reward")]
    elif list(rate.points) == list(reward.points):
        lines, legend = [rate], [("good", "pass rate, which is also the mean reward, with its 95% interval")]
    else:
        lines, legend = [reward, rate], [("good", "pass rate, with its 95% interval"), ("a", "mean reward")]
    return line_chart(lines, label=label, x_label="iteration", width=1040, height=280), legend


def metric_charts(series: dict[str, list[tuple[int, float | None]]]) -> list[tuple[str, "Markup"]]:
    """One small chart a training metric, the well-known ones first."""
    order = {name: index for index, name in enumerate(_FIRST_METRICS)}
    names = sorted(series, key=lambda name: (order.get(name, len(order)), name))
    return [
        (
            name,
            line_chart(
                [Series(name, "a", series[name])], label=f"{name} by iteration", x_label="", width=330, height=170
            ),
        )
        for name in names
        if any(value is not None for _, value in series[name])
    ]


def counted(values: "pl.Series") -> list[tuple[str, int, float]]:
    """Each value with its count and its share, the commonest first; nulls are left out."""
    known = values.drop_nulls()
    counts = known.value_counts(name="n").sort(["n", values.name], descending=[True, False])
    return [(str(value), n, n / len(known)) for value, n in counts.iter_rows()]


def length_charts(
    frame: "pl.DataFrame",
) -> tuple["Markup", list[tuple[str, str]], "Markup | None"] | None:
    """Response lengths by outcome with the legend, as (tone, name), and the mean reward at each length.

    None where lengths are not known.
    """
    import polars as pl

    known = frame.filter(pl.col("response_tokens").is_not_null())
    if known.is_empty():
        return None
    largest = int(known["response_tokens"].max())  # type: ignore[arg-type]
    width = bin_width(largest)
    outcome = (
        pl.when(pl.col("status") != "ok").then(pl.lit("not graded"))
        .when("is_correct").then(pl.lit("correct"))
        .when(pl.col("is_correct").is_not_null()).then(pl.lit("not correct"))
        .otherwise(pl.lit("not judged"))
    )  # fmt: skip
    known = known.with_columns(bin=pl.col("response_tokens") // width, outcome=outcome)
    counts = {(b, o): n for b, o, n in known.group_by("bin", "outcome").len().iter_rows()}
    tones = (("correct", "good"), ("not correct", "quiet"), ("not judged", "a"), ("not graded", "bad"))
    bins = [
        Bin(index * width, (index + 1) * width, [(name, tone, counts.get((index, name), 0)) for name, tone in tones])
        for index in range(largest // width + 1)
    ]
    label = "sampled tokens an episode"
    distribution = histogram(bins, label="distribution of response lengths", x_label=label)
    dots = []
    for (index,), part in sorted(known.filter(pl.col("reward").is_not_null()).group_by("bin")):
        rewards = part["reward"]
        judged = part["is_correct"].drop_nulls()
        interval = None
        if len(judged) == len(rewards) and set(rewards) <= {0.0, 1.0}:
            interval = Share(int(rewards.sum()), len(rewards)).interval
        mean = float(rewards.mean())  # type: ignore[arg-type]
        dots.append(Dot((float(index) + 0.5) * width, mean, len(rewards), interval))
    bounds = (bins[0].low, bins[-1].high)
    scatter = (
        dot_chart(dots, label="mean reward at each response length", x_label=label, x_bounds=bounds) if dots else None
    )
    present = {name for _, name in counts}
    return distribution, [(tone, name) for name, tone in tones if name in present], scatter


def task_distribution(scores: "pl.DataFrame") -> "Markup | None":
    """How many tasks have which pass rate; None where nothing was judged."""
    rates = scores["pass_rate"].drop_nulls()
    if rates.is_empty():
        return None
    counts = [0] * 10
    for rate in rates:
        counts[min(9, int(rate * 10 + 1e-9))] += 1
    bins = [Bin(index / 10, (index + 1) / 10, [("tasks", "a", n)]) for index, n in enumerate(counts)]
    return histogram(bins, label="tasks by pass rate", x_label="pass rate (the last column holds 100%)")


def task_outcomes(scores: "pl.DataFrame") -> list[tuple[str, int, float]]:
    """How many tasks were solved never, sometimes and always: only the middle ones tell attempts apart."""
    rates = scores["pass_rate"].drop_nulls()
    counts = {
        "always solved": rates.filter(rates == 1.0).len(),
        "sometimes": rates.filter((rates > 0.0) & (rates < 1.0)).len(),
        "never": rates.filter(rates == 0.0).len(),
    }
    return [(name, n, n / len(rates)) for name, n in counts.items()]


def artifact_rows(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """What a person needs to find and judge each artifact."""
    return [
        {
            "ref": str(manifest.ref),
            "key": manifest.key,
            "digest": manifest.digest,
            "made": manifest.finished_at.strftime("%Y-%m-%d %H:%M UTC"),
            "work_s": manifest.work_s,
            "rows": {
                table: sum(entry.rows or 0 for entry in manifest.table_files(table))
                for table in manifest.schema_versions
            },
            "inputs": [str(ref) for refs in manifest.inputs.values() for ref in refs],
            "code": _code(manifest),
        }
        for manifest in manifests
    ]


def configs(manifests: Sequence[Manifest]) -> list[tuple[str, dict[str, Any]]]:
    """Each different config with the artifacts that it made."""
    by_config: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        by_config.setdefault(manifest.stage + _pretty(manifest.config), []).append(manifest)
    return [
        (f"{same[0].stage} ({same[0].ref}{f' and {len(same) - 1} more' if len(same) > 1 else ''})", same[0].config)
        for same in by_config.values()
    ]


def _code(manifest: Manifest) -> str:
    code = manifest.code
    commit = "" if code.commit is None else f" at {code.commit[:12]}{' with changes' if code.dirty else ''}"
    return f"rollmill {code.version}{commit}"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
