"""`checkmate-tf solve`: what it prints and writes, how it ends, and that it needs no TensorFlow."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import graphs_for_solvers as small
import pytest

from checkmate_tf import cli
from checkmate_tf.core.graph_file import read_graph, write_graph
from checkmate_tf.solvers import minimum_budget

ROOT = Path(__file__).parents[2]
KEYS = {
    "status", "cost", "cost_increase_percent", "peak", "lower_bound", "bound_of", "gap_percent", "seconds", "strategy",
    "n", "m", "budget",
}  # fmt: skip


@pytest.fixture
def graph_file(tmp_path):
    def write(graph):
        path = tmp_path / "graph.json"
        write_graph(path, graph)
        return path

    return write


def solve(capsys, path, *options):
    status = cli.main(["solve", str(path), *map(str, options)])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else None


@pytest.mark.parametrize("budget", [("--budget-fraction", "0.6"), ("--budget", "{}"), ("--budget", "{} B")])
def test_prints_one_object_and_writes_the_sequence(graph_file, capsys, tmp_path, budget):
    graph = small.residual(4)
    path, out = graph_file(graph), tmp_path / "sequence.json"
    limit = int(0.6 * graph.store_all_peak_bytes)
    plot = tmp_path / "search.png"
    options = ["--time-limit", 2, "--out", out, "--plot", plot]
    status, found = solve(capsys, path, budget[0], budget[1].format(limit), *options)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert status == 0
    assert found.keys() == KEYS
    cost, peak = small.run(graph, json.loads(out.read_text()))
    assert abs(found["budget"] - limit) <= 1  # rounding of the fraction
    assert (found["cost"], found["peak"]) == (pytest.approx(cost), peak)
    assert peak <= found["budget"]
    assert found["cost_increase_percent"] == pytest.approx(100 * (cost / graph.total_cost - 1), abs=1e-4)
    assert found["lower_bound"] <= cost * (1 + 1e-9)
    assert (found["n"], found["m"]) == (graph.n, sum(map(len, graph.deps)))


def test_proven_infeasibility_is_status_3(graph_file, capsys, tmp_path):
    out = tmp_path / "sequence.json"
    status, found = solve(capsys, graph_file(small.chain(5)), "--budget", 1, "--time-limit", 2, "--out", out)
    assert (status, found["status"]) == (3, "infeasible")
    assert found["bound_of"]
    assert found["cost"] is found["gap_percent"] is None
    assert not out.exists()


def test_the_exact_minimum_is_enough_and_one_byte_less_is_not(graph_file, capsys):
    path = graph_file(small.chain(5))
    least = minimum_budget(small.chain(5)).budget_bytes
    assert solve(capsys, path, "--budget", least, "--time-limit", 2)[0] == 0
    assert solve(capsys, path, "--budget", least - 1, "--time-limit", 2)[0] == 3


@pytest.mark.parametrize("budget", [2**62, 2**63 - 1, 2**63, 2**80])
def test_budgets_of_64_bits_and_more_are_plenty(graph_file, capsys, budget):
    status, found = solve(capsys, graph_file(small.chain(5)), "--budget", budget, "--time-limit", 2)
    assert (status, found["status"], found["cost_increase_percent"]) == (0, "optimal", 0.0)


def test_nothing_found_is_status_4(graph_file, capsys):
    status, found = solve(capsys, graph_file(small.chain(5)), "--budget-fraction", 0.7, "--strategy", "checkpoint_all")
    assert (status, found["status"]) == (4, "unknown")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget 0", "must be positive"),
        ("--budget 1e400", "whole bytes or a size"),
        ("--budget nan", "whole bytes or a size"),
        ("--budget 1.5", "whole bytes or a size such as 4GiB; got '1.5'"),
        ("--budget auto", "got 'auto'"),
        ("--budget-fraction 1.5", "above 0 and at most 1"),
        ("--budget-fraction nan", "above 0 and at most 1"),
        ("--budget 9 --seed -1", "seed must not be negative"),
        ("--budget 9 --out /no/such/place/s.json", "folder that exists; got /no/such/place/s.json"),
        ("--budget 9 --plot /no/such/place/s.png", "folder that exists; got /no/such/place/s.png"),
    ],
)
def test_unusable_options_are_status_2_with_a_message(graph_file, capsys, options, message):
    assert cli.main(["solve", str(graph_file(small.chain(3))), *options.split()]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert re.search(message, captured.err)


def test_an_unusable_graph_is_status_2_with_a_message(tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text('{"nodes": 3}')
    assert cli.main(["solve", str(path), "--budget", "5"]) == 2
    assert '"nodes" must be a list; got a number' in capsys.readouterr().err
    assert cli.main(["solve", str(tmp_path / "missing.json"), "--budget", "5"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "one of the arguments"),
        ("--budget 5 --budget-fraction 0.5", "not allowed with"),
        ("--budget 5 --time-limit 0", "must be a number of seconds above 0; got 0"),
        ("--budget 5 --strategy magic", "invalid choice: 'magic'"),
    ],
)
def test_options_that_cannot_be_are_refused(graph_file, capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["solve", str(graph_file(small.chain(3))), *options.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_interrupt_gives_the_best_so_far(graph_file, tmp_path):
    graph = small.residual(60)
    path, out = graph_file(graph), tmp_path / "sequence.json"
    command = [sys.executable, "-m", "checkmate_tf", "solve", path, "--budget-fraction", "0.3", "--time-limit", "120"]
    process = subprocess.Popen([*command, "--out", out], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    time.sleep(4.0)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found = json.loads(text)
    assert found["seconds"] < 60
    assert small.run(read_graph(path), json.loads(out.read_text()))[1] <= found["budget"]


def test_tensorflow_is_not_loaded(graph_file):
    code = "import sys; from checkmate_tf.cli import main; main(); sys.exit('tensorflow' in sys.modules)"
    options = [str(graph_file(small.chain(4))), "--budget-fraction", "0.8"]
    ran = subprocess.run([sys.executable, "-c", code, "solve", *options], cwd=ROOT, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
