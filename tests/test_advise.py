"""Advice as text, page, file and figure, and on the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

import checkmate_tf
from checkmate_tf import cli
from checkmate_tf.commands import steps
from checkmate_tf.errors import FileError, ModelError
from checkmate_tf.reports.advice import Advice, Limits, Way

MIB = 1 << 20
LIMITS = Limits(30 * MIB, 10 * MIB, MIB, 0, 'layer "conv"', 16 * MIB, 2 * MIB, 47 * MIB)
PLAIN = Way("plain Keras", "model.fit(...)", "nothing", False, 100 * MIB, 1.0, largest_batch=7)
PLANNED = Way("planned", "checkmate_tf.compile(model, 0.6)", "nothing", True, 59 * MIB, 1.1, 47 * MIB, 20)
FUSED = Way(
    "planned, fused", 'checkmate_tf.compile(model, 0.6, implementations="fused")', "rounding", True, 58 * MIB, 0.9
)
MIXED = Way("mixed_bfloat16", "first <line>\nsecond line", "precision", note="left out, as time_limit_s was reached.")
ADVICE = Advice(60 * MIB, 16, "CPU:0", 0.5, (MIXED, PLANNED, PLAIN, FUSED), LIMITS, ("a note",), {"planned": 2.5})


def test_the_fastest_comes_first_and_what_is_not_known_last():
    assert [way.name for way in ADVICE.ways] == ["planned, fused", "plain Keras", "planned", "mixed_bfloat16"]
    assert ADVICE.fastest == FUSED
    assert ADVICE.fastest_unchanged == PLANNED


def test_the_text_is_an_aligned_table_with_what_to_do_and_what_to_write():
    table, sentences, code, notes = str(ADVICE).split("\n\n")
    lines = table.splitlines()
    assert lines[0] == "checkmate_tf advice: 16 rows within 60.00 MiB on CPU:0; the unmodified step takes 0.500 s"
    assert lines[2].split() == ["planned,", "fused", "58.00", "MiB", "0.90", "yes", "rounding", "-"]
    assert lines[3].split() == ["plain", "Keras", "100.00", "MiB", "1.00", "no", "nothing", "7"]
    assert lines[5].split() == ["mixed_bfloat16", "-", "-", "-", "precision", "-"]
    assert sentences.startswith(
        "Fastest within the budget: planned, fused (0.90 times the time). "
        "Fastest that changes nothing: planned (1.10 times the time)."
    )
    assert FUSED.code in code
    assert [line.split() for line in code.splitlines()[-2:]] == [
        ["mixed_bfloat16", "first", "<line>"],
        ["second", "line"],
    ]
    assert notes.splitlines() == ["  mixed_bfloat16: left out, as time_limit_s was reached.", "  note: a note"]


def test_the_higher_of_two_limits_is_named():
    of_op, of_weights = LIMITS, dataclasses.replace(LIMITS, gradients_bytes=18 * MIB)
    assert of_op.is_of_largest_op
    assert not of_weights.is_of_largest_op
    assert "16.00 MiB of inputs and outputs and 2.00 MiB of scratch" in " ".join(of_op.sentences())
    assert "microbatches lower it, but not below 40.00 MiB" in of_op.sentences()[-1]
    assert "cannot go below 47.00 MiB (proven), in which weights and slots have" in of_op.sentences()[-1]
    assert "go no lower" in of_weights.sentences()[-1]
    assert "not the step" in dataclasses.replace(LIMITS, others_bytes=1).sentences()[0]


def test_the_way_that_can_go_lowest_is_named():
    lower = dataclasses.replace(FUSED, needed_bytes=40 * MIB)
    assert "planned, fused, not below 40.00 MiB" in dataclasses.replace(ADVICE, ways=(lower, PLANNED)).sentences()[-1]
    assert "can go lowest" not in " ".join(ADVICE.sentences())


def test_where_the_step_fits_nothing_is_to_be_done():
    fits = dataclasses.replace(PLAIN, within_budget=True)
    assert (
        dataclasses.replace(ADVICE, ways=(fits, FUSED)).verdict() == "The step fits as it is: nothing has to be done."
    )


def test_where_nothing_is_within_the_budget_it_says_why():
    none = dataclasses.replace(ADVICE, ways=(PLAIN, MIXED))
    assert none.fastest is None
    assert none.verdict() == (
        "No way was found within the budget. The smallest peak that was found: 100.00 MiB, plain Keras. "
        "Try: a smaller batch, or a larger budget."
    )
    hopeless = dataclasses.replace(none, budget_bytes=20 * MIB)
    assert hopeless.verdict().startswith("Nothing here helps: weights and optimizer slots alone take 30.00 MiB, more")


def test_json_round_trip():
    assert Advice.from_json(ADVICE.to_json()) == ADVICE
    assert "Infinity" not in ADVICE.to_json()


def changed(**changes):
    data = json.loads(ADVICE.to_json()) | changes
    return json.dumps({name: value for name, value in data.items() if value != "delete"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON"),
        ("[]", "this text is not one"),
        (changed(format="checkmate_tf.report"), "this text is not one"),
        (changed(version=99), "version 1; this one has 99"),
        (changed(limits="delete"), "lacks 'limits'"),
        (changed(ways=[{"name": "planned"}]), "lacks 'code'"),
        (changed(ways=3), "right kind"),
        (changed(ways=[vars(PLAIN) | {"predicted_peak_bytes": "1"}]), "'1' is not a whole number"),
        (changed(ways=[vars(PLAIN) | {"within_budget": 1}]), "1 is not true or false"),
        (changed(limits=[]), "is not an object"),
        (changed(budget_bytes=None), "None is not a whole number"),
        (changed(batch_size=True), "True is not a whole number"),
        (changed(notes=[1]), "1 is not text"),
        (changed(phases_s=[]), "right kind"),
    ],
)
def test_a_text_that_is_no_advice_is_refused(text, message):
    with pytest.raises(FileError, match=message):
        Advice.from_json(text)


def test_the_page_has_the_table_the_code_and_the_plot(tmp_path):
    path = tmp_path / "advice.html"
    ADVICE.save_html(path)
    page = path.read_text()
    assert "first &lt;line&gt;<br>second line" in page
    assert page.count("<tr>") == 2 * (1 + len(ADVICE.ways))
    assert page.count("data:image/png") == 1
    assert "a note" in page


def test_the_plot_has_one_labelled_point_for_each_known_way():
    axes = ADVICE.plot().axes[0]
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert points["within the budget"] == [[58.0, 0.9], [59.0, 1.1]]
    assert points["above it"] == [[100.0, 1.0]]
    assert "budget 60.00 MiB" in points
    assert [text.get_text() for text in axes.texts] == ["planned, fused", "plain Keras", "planned"]
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.01, "labels do not cover one another"


def test_what_is_not_known_has_no_plot():
    unknown = dataclasses.replace(ADVICE, ways=(MIXED,))
    with pytest.raises(ValueError, match="known peak and time"):
        unknown.plot()
    assert "data:image" not in unknown._repr_html_()


@pytest.fixture
def stub(monkeypatch):
    """Stands in for `advise`; keeps what it is called with."""
    calls = []
    monkeypatch.setattr(steps, "build", lambda settings: settings)
    monkeypatch.setattr(steps, "reserve", lambda _: None)

    def install(answer):
        def advise(*positional, **options):
            calls.append((positional, options))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(checkmate_tf, "advise", advise, raising=False)
        return calls

    return install


def test_the_command_shows_and_writes_what_was_found(stub, capsys, tmp_path):
    calls = stub(ADVICE)
    files = {name: tmp_path / f"advice.{name}" for name in ("json", "html")} | {"plot": tmp_path / "advice.png"}
    options = " ".join(f"--{name} {path}" for name, path in files.items())
    command = f"advise --model MobileNet --image-size 64 --batch-size 4 --budget 0.6 --time-limit 7 {options}"
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == f"{ADVICE}\n"
    (((model, budget, spec), asked),) = calls
    assert (model.model, budget) == ("MobileNet", 0.6)
    assert [leaf.shape.as_list() for leaf in spec] == [[4, 64, 64, 3], [4]]
    assert asked == {"time_limit_s": 7.0, "verbose": True}
    assert Advice.from_json(files["json"].read_text()) == ADVICE
    assert "data:image/png" in files["html"].read_text()
    assert files["plot"].stat().st_size > 5000


def test_no_way_within_the_budget_is_a_failure_of_the_command(stub, tmp_path):
    stub(dataclasses.replace(ADVICE, ways=(MIXED,)))
    plot = tmp_path / "advice.png"
    assert cli.main(["advise", "--plot", str(plot)]) == 1
    assert not plot.exists()


def test_what_cannot_be_used_is_one_message(stub, capsys, tmp_path):
    stub(ModelError("no such model."))
    assert cli.main(["advise", "--budget", "1GiB"]) == 2
    assert "checkmate-tf: ModelError: no such model." in capsys.readouterr().err
    assert cli.main(["advise", "--html", str(tmp_path / "no folder" / "out")]) == 2
    assert "must be in a folder that exists" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["advise", "--budget", "4G"])
