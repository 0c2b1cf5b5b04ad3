"""Reports: what is not known is None, what is written is read back, and plots show the data."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate_tf.reports.report import KINDS, HeldTensor, ImplementationRow, Report, ScheduleRow, SizeRow

MIB = 1024**2


def full_report(**changes) -> Report:
    report = Report(
        budget_bytes=400 * MIB,
        predicted_peak_bytes=390 * MIB,
        measured_peak_bytes=395 * MIB,
        plain_peak_bytes=800 * MIB,
        predicted_step_s=1.1,
        measured_step_s=1.05,
        plain_step_s=1.0,
        predicted_overhead=1.08,
        lower_bound=1.09,
        gap=0.0092,
        status="feasible",
        strategy="auto",
        phases_s={"trace": 2.0, "solve": 10.25},
        implementations=[ImplementationRow("batch_norm", "bn<1>", 30 * MIB)],
        sizes=(
            SizeRow(((8, 256), (8,)), 390 * MIB, 390 * MIB, 1.0, 7),
            SizeRow(((8, 512), np.array([8])), np.int64(800 * MIB), 380 * MIB, np.float64(1.08), 3),
        ),
        recomputed={"relu": 2, "conv<1>": 1},
        timeline_bytes=np.array([100, 300, 390, 200]) * MIB,
        timeline_split_bytes={
            "workspace": np.array([0, 50, 90, 0]) * MIB,
            "weights": np.array([100, 100, 100, 100]) * MIB,
            "activations": np.array([0, 150, 200, 100]) * MIB,
        },
        peak_tensors=(
            HeldTensor("model/block/conv<1>", 200 * MIB, "activations"),
            HeldTensor("relu", 90 * MIB, "workspace"),
        ),
        schedule=(
            ScheduleRow("conv<1>", (0, 3), (2, 3)),
            ScheduleRow("relu", (1, 4, 5), (3, 4, 6)),
            ScheduleRow("grad/relu", np.array([6]), np.array([6]), is_gradient=True),
        ),
        search=((1.0, 1.3), (np.float64(2.5), 1.1)),
        search_bounds=((0.5, 1.0), (2.0, np.float64(1.09))),
        notes=("The last batch is smaller & runs unplanned.",),
    )
    return dataclasses.replace(report, **changes)


@pytest.mark.parametrize(("budget_mib", "line"), [(400, "400.00 MiB"), (390, "390.00 MiB, exceeded by 5.00 MiB")])
def test_a_budget_that_was_measured_to_be_exceeded_says_so(budget_mib, line):
    """Its status, "feasible", stood alone."""
    facts = dict(full_report(budget_bytes=budget_mib * MIB).facts())
    assert facts["budget"] == line


def test_an_empty_report_knows_nothing():
    report = Report()
    named = (
        "budget_bytes predicted_peak_bytes measured_peak_bytes plain_peak_bytes predicted_step_s measured_step_s "
        "plain_step_s overhead lower_bound gap strategy"
    )
    assert all(getattr(report, name) is None for name in named.split())
    assert report.status == "unplanned"
    assert "None" not in str(report)


def test_reports_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        full_report().budget_bytes = 1


def test_equivalents_that_write_more_say_so():
    rows = [ImplementationRow("pooling_by_places", name, -MIB) for name in ("pool1", "pool2")]
    text = str(full_report(implementations=[*rows, ImplementationRow("batch_norm", "bn", 30 * MIB)]))
    assert "pooling_by_places x 2 (2.00 MiB more written), batch_norm x 1 (30.00 MiB less written)" in text


def test_overhead_is_measured_where_both_times_are():
    assert full_report().overhead == pytest.approx(1.05)
    assert full_report(measured_step_s=None).overhead == 1.08
    assert full_report(plain_step_s=None).overhead == 1.08
    assert full_report(plain_step_s=None, predicted_overhead=None).overhead is None


def test_numpy_values_become_plain_ones():
    report = full_report(budget_bytes=np.int64(5), gap=np.float64(0.5))
    assert type(report.budget_bytes) is int
    assert type(report.gap) is float
    assert report.timeline_bytes == (100 * MIB, 300 * MIB, 390 * MIB, 200 * MIB)
    assert report.schedule[2].steps == (6,)
    assert list(report.timeline_split_bytes) == ["weights", "activations", "workspace"]
    assert report.search == ((1.0, 1.3), (2.5, 1.1))
    assert type(report.search_bounds[1][1]) is float


def test_an_unknown_kind_of_memory_is_refused():
    with pytest.raises(ValueError, match="'forward'"):
        Report(timeline_bytes=(1,), timeline_split_bytes={"forward": (1,)})


def test_kinds_of_memory_must_cover_the_timeline():
    with pytest.raises(ValueError, match="weights must have one entry per step of the plan, 2"):
        Report(timeline_bytes=(1, 1), timeline_split_bytes={"weights": (1,)})


def test_each_run_must_have_an_end():
    with pytest.raises(ValueError, match="op: until must have one entry per run"):
        ScheduleRow("op", (1, 2), (3,))


def test_json_round_trip():
    report = full_report()
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(Report().to_json()) == Report()
    assert json.loads(report.to_json())["version"] == 6


maybe_bytes = st.none() | st.integers(0, 2**50)
maybe_seconds = st.none() | st.floats(0, 1e6)
SHAPES = st.lists(st.lists(st.integers(0, 2**40), max_size=3), max_size=3)


@given(
    st.builds(
        Report,
        budget_bytes=maybe_bytes,
        measured_peak_bytes=maybe_bytes,
        plain_step_s=maybe_seconds,
        measured_step_s=maybe_seconds,
        gap=maybe_seconds,
        status=st.text(),
        strategy=st.none() | st.text(),
        phases_s=st.dictionaries(st.text(), st.floats(0, 1e6)),
        recomputed=st.dictionaries(st.text(), st.integers(1, 9)),
        device_peaks_bytes=st.dictionaries(st.text(), st.integers(0, 2**50)),
        timeline_bytes=st.just((1, 2, 3)),
        timeline_split_bytes=st.dictionaries(st.sampled_from(KINDS), st.tuples(*[st.integers(0, 2**50)] * 3)),
        sizes=st.lists(st.builds(SizeRow, SHAPES, *[st.integers(0, 2**50)] * 2, st.floats(0, 9), st.integers(0, 99))),
        peak_tensors=st.lists(st.builds(HeldTensor, st.text(), st.integers(0, 2**50), st.sampled_from(KINDS))),
        schedule=st.lists(st.builds(lambda name, steps: ScheduleRow(name, steps, steps), st.text(), st.just((1, 5)))),
        search=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))),
        notes=st.lists(st.text()),
    )
)
def test_any_report_survives_json_and_can_be_shown(report):
    assert Report.from_json(report.to_json()) == report
    assert str(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "this text is not one"),
        ({"version": 99}, "version 6; this one has 99"),
        ({"gap": "delete"}, "lacks 'gap'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change, message):
    data = json.loads(full_report().to_json())
    data.update(change)
    data = {name: value for name, value in data.items() if value != "delete"}
    with pytest.raises(ValueError, match=message):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  json's own error and ours
        Report.from_json(text)


def test_a_number_that_json_lacks_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        Report(gap=float("inf")).to_json()


def test_text_is_an_aligned_table():
    lines = str(full_report()).splitlines()
    assert lines[1].split() == ["plain", "predicted", "measured"]
    assert lines[2].split("  ")[1] == "allocator peak"
    assert lines[2].split()[2:] == ["800.00", "MiB", "390.00", "MiB", "395.00", "MiB"]
    assert len({len(line) for line in lines[1:4]}) == 1
    text = str(full_report())
    assert "400.00 MiB" in text
    assert "1.050 x the plain step time" in text
    assert "0.92 %" in text
    assert "2 ops, 3 times: relu x 2, conv<1>" in text
    assert "note: The last batch" in text


def test_text_names_only_the_most_recomputed_ops():
    text = str(Report(recomputed={f"op{i}": i for i in range(1, 9)}))
    assert "8 ops, 36 times: op8 x 8, op7 x 7, op6 x 6, op5 x 5, op4 x 4, and 3 more" in text


def lines_by_label(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_memory_plot_holds_the_data():
    figure = full_report().plot_memory()
    (axes,) = figure.axes
    lines = lines_by_label(axes)
    np.testing.assert_allclose(lines["in use"].get_ydata(), [100, 300, 390, 200])
    np.testing.assert_array_equal(lines["in use"].get_xdata(), [0, 1, 2, 3])
    assert list(lines["budget 400.00 MiB"].get_ydata()) == [400, 400]
    assert list(lines["plain peak 800.00 MiB"].get_ydata()) == [800, 800]
    assert list(lines["allocator's peak 390.00 MiB"].get_ydata()) == [390, 390]
    peak = lines["peak of the tensors 390.00 MiB"]
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([2], [390])
    assert "MiB" in axes.get_ylabel()


def test_memory_plot_stacks_the_kinds():
    (axes,) = full_report().plot_memory().axes
    layers = {c.get_label(): c.get_paths()[0].vertices[:, 1].max() for c in axes.collections}
    assert layers == {"weights, slots, batch": 100, "activations": 300, "workspace": 390}
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown[-3:] == ["workspace", "activations", "weights, slots, batch"], "as they lie on one another"


def test_memory_plot_names_what_makes_up_the_peak():
    (axes,) = full_report().plot_memory().axes
    (text,) = [text.get_text().splitlines() for text in axes.texts]
    assert text[0] == "At the peak, 2 tensors:"
    assert text[1].split() == ["200.00", "MiB", "model/block/conv<1>"]
    many = tuple(HeldTensor(f"some/rather/long/name/of/a/layer{k}", MIB, "gradients") for k in range(9))
    (axes,) = full_report(peak_tensors=many).plot_memory().axes
    lines = axes.texts[0].get_text().splitlines()
    assert lines[1].split() == ["1.00", "MiB", "some/rather/long/name/of/a/layer0"]
    assert lines[-1].split() == ["3.00", "MiB", "in", "3", "smaller", "ones"]


def test_memory_plot_without_what_is_not_known():
    report = full_report(
        budget_bytes=None, plain_peak_bytes=None, predicted_peak_bytes=None, timeline_split_bytes={}, peak_tensors=()
    )
    (axes,) = report.plot_memory().axes
    assert set(lines_by_label(axes)) == {"in use", "peak of the tensors 390.00 MiB"}
    assert not axes.collections
    assert not axes.texts


def test_schedule_plot_holds_the_data():
    (axes,) = full_report().plot_schedule().axes
    lines = lines_by_label(axes)
    points = {label: sorted(zip(*map(list, line.get_data()), strict=True)) for label, line in lines.items()}
    assert points == {
        "forward": [(0, 0), (1, 1)],
        "backward and update": [(6, 2)],
        "recomputed (3)": [(3, 0), (4, 1), (5, 1)],
    }
    (held,) = axes.collections
    assert sorted((a[0], b[0], a[1]) for a, b in (s.tolist() for s in held.get_segments())) == [
        (0, 2, 0),
        (1, 3, 1),
        (3, 3, 0),
        (4, 4, 1),
        (5, 6, 1),
        (6, 6, 2),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["conv<1>", "relu", "grad/relu"]
    assert axes.get_ylim() == (2.5, -0.5)


def test_search_plot_holds_the_data():
    (axes,) = full_report().plot_search().axes
    lines = lines_by_label(axes)
    assert lines["best plan so far"].get_xydata()[:2].tolist() == [[1.0, 1.3], [2.5, 1.1]]
    assert lines["lower bound 1.09 s"].get_xydata()[:2].tolist() == [[0.5, 1.0], [2.0, 1.09]]
    assert [text.get_text() for text in axes.texts] == ["gap 0.92 %", ""]
    (axes,) = full_report(search_bounds=()).plot_search().axes
    assert set(lines_by_label(axes)) == {"best plan so far"}


def test_schedule_plot_of_many_ops_names_none():
    rows = tuple(ScheduleRow(f"op{i}", (i,), (i + 1,)) for i in range(500))
    (axes,) = full_report(schedule=rows).plot_schedule().axes
    assert not any(label.get_text().startswith("op") for label in axes.get_yticklabels())
    assert len(lines_by_label(axes)["forward"].get_xdata()) == 500


def test_plots_can_be_drawn(tmp_path):
    report = full_report()
    for name in ("plot_memory", "plot_schedule", "plot_search", "plot_sizes"):
        path = tmp_path / f"{name}.png"
        getattr(report, name)().savefig(path)
        assert path.stat().st_size > 5_000


def test_what_runs_unplanned_says_why_there_is_no_plot():
    report = Report(notes=("It runs unplanned because it fits.",))
    with pytest.raises(ValueError, match="because it fits"):
        report.plot_memory()
    with pytest.raises(ValueError, match="'unplanned'"):
        Report().plot_schedule()
    with pytest.raises(ValueError, match="nothing had to be searched"):
        Report().plot_search()
    with pytest.raises(ValueError, match="share for this plot"):
        Report().plot_sizes()


def test_plans_that_sizes_share_stand_in_a_table_and_a_figure():
    report = full_report()
    assert "up to (8, 512), (8,)" in str(report)
    assert report.shared()[1][1:] == ("800.00 MiB", "380.00 MiB", "1.080 x", "3")
    assert all(cell in report._repr_html_() for cell in report.shared()[1])
    memory, time = report.plot_sizes().axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in memory.lines}
    assert lines["planned peak"] == ([256, 512], [390.0, 380.0])
    assert lines["plain peak"] == ([256, 512], [390.0, 800.0])
    assert lines["budget"][1] == [400.0, 400.0]
    assert list(time.lines[0].get_ydata()) == [1.0, 1.08]
    assert [text.get_text() for text in time.texts] == ["7 batches", "3 batches"]


def test_sizes_that_differ_in_several_dimensions_are_drawn_over_their_elements():
    rows = [SizeRow(((1, size, size // 2),), 1, 1, 1.0, 1) for size in (4, 8)]
    (line,) = full_report(sizes=rows, budget_bytes=None).plot_sizes().axes[1].lines
    assert list(line.get_xdata()) == [8, 32]
