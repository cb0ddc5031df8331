"""loss.png: training and held-out loss over steps."""

from __future__ import annotations

from pathlib import Path

from mt_files import writing

from mt_train.reporting.metrics import read_metrics, sets_of

_MOST_SETS = 12


def draw_loss(metrics: Path, picture: Path) -> None:
    """Draw the losses of a metrics file as a PNG.

    Raises:
        FileError: The metrics can't be read or the picture can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics))
    training, held_out = (
        [(record["step"], record[name]) for record in records if record.get(name) is not None]
        for name in ("loss", "val_loss")
    )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=0.8, alpha=0.5, label="training")
        axes.plot(*zip(*_smooth(training), strict=True), color="C0", label="training, smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="C1", label="held out")
    sets = dict.fromkeys(name for record in records for name in sets_of(record))
    for name in list(sets)[:_MOST_SETS]:
        evaluated = ((each["step"], each.get(f"val_loss/{name}")) for each in records)
        points = [(step, loss) for step, loss in evaluated if loss is not None]
        if points:
            axes.plot(*zip(*points, strict=True), ".--", linewidth=0.8, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(visible=True, alpha=0.3)
    if training or held_out:
        axes.legend()
    with writing(picture) as file:
        figure.savefig(file, dpi=120, format="png")


def _smooth(points: list[tuple[int, float]], decay: float = 0.95) -> list[tuple[int, float]]:
    smoothed, total, weight = [], 0.0, 0.0
    for step, value in points:
        total, weight = decay * total + value, decay * weight + 1
        smoothed.append((step, total / weight))
    return smoothed
