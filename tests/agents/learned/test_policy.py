"""Tests the policy: network, decoding, and planners, with random weights and with the shipped ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import agents
from agents.learned import policy
from agents.learned.checkpoint import save_weights
from agents.learned.policy import WEIGHTS
from agents.learned.policy_net import MASKED, PolicyNet, batch_of, data_of, decode, fit, rows_of_kinds, sample, trained
from agents.planner import Infeasible
from agents.search.annealing import everything
from experiments.common.report import heuristics
from experiments.figures import program as bundled
from simulator import Machine, Program, simulate
from simulator.compiled.engine import Engine
from simulator.files import FormatError
from simulator.modes import Choice
from simulator.moves.gap_graph import UNDECIDED, BinColumns, BinState, GapGraph, GapState
from simulator.moves.moves import Moves
from simulator.moves.plan_moves import PlanArrays
from simulator.program import Gap
from tests.agents.planned import planned
from tests.agents.search.test_search import MACHINE, pyramid
from tests.strategies import networks


def graph_of(program: Program, fraction: float, mode: str = "joint") -> GapGraph:
    limit = max(int(fraction * program.peak_bytes), 1)
    return GapGraph(program, MACHINE, limit, Moves(program, limit, mode, 1, 0), mode)


def random_net(graph: GapGraph, seed: int = 0) -> PolicyNet:
    """Returns a network with all weights random, because weights initialized to 0 would hide errors."""
    torch.manual_seed(seed)
    gap_columns = len(graph.columns) + len(GapState._fields)
    net = PolicyNet(gap_columns, len(BinColumns._fields) + len(BinState._fields), 16, 2).eval()
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return net


def test_batched_outputs_equal_single_outputs() -> None:
    rng = np.random.default_rng(0)
    graphs = [graph_of(pyramid(n, n), 0.6) for n in (4, 9, 6)]
    decided = [np.where(rng.random(len(g)) < 0.5, Choice.RESIDENT, UNDECIDED) for g in graphs]
    net = random_net(graphs[0])
    data = [data_of(g, d) for g, d in zip(graphs, decided, strict=True)]
    with torch.no_grad():
        batched = net(batch_of(data))
        single = torch.cat([net(batch_of([item])) for item in data])
    assert torch.allclose(batched, single, atol=1e-4)
    allowed = torch.cat([torch.from_numpy(g.allowed) for g in graphs])
    assert (batched[~allowed] == MASKED).all() and (batched[allowed].abs() < 1e3).all()


def test_a_decision_changes_the_probabilities_of_other_gaps() -> None:
    graph = graph_of(pyramid(8, 0), 0.5)
    net = random_net(graph)
    decided = np.full(len(graph), UNDECIDED)
    with torch.no_grad():
        nothing = net(batch_of([data_of(graph, decided)]))
        decided[0] = Choice.RESIDENT
        assert (nothing[1:] - net(batch_of([data_of(graph, decided)]))[1:]).abs().max() > 1e-4


@given(networks(), st.floats(0.3, 1.0), st.integers(0, 5), st.sampled_from(["swap", "recompute", "joint"]))
def test_decoded_plans_fit(program: Program, fraction: float, seed: int, mode: str) -> None:
    graph = graph_of(program, fraction, mode)
    if not len(graph):
        return
    engine = Engine(program, MACHINE, graph.limit)
    kinds, initial, at_decision = decode(random_net(graph, seed), graph, 3)
    assert graph.allowed[np.arange(len(graph)), kinds].all()
    assert np.allclose(initial.sum(1), 1, atol=1e-5) and np.allclose(at_decision.sum(1), 1, atol=1e-5)
    sampled, resampled = (sample(initial, np.random.default_rng(seed)) for _ in range(2))
    assert (sampled == resampled).all() and graph.allowed[np.arange(len(graph)), sampled].all()
    rows = fit(engine, graph, kinds, at_decision)
    if rows is not None:
        assert engine.score(rows).feasible
        assert len(rows) == 0 or len(rows) <= len(graph)
    elif mode == "swap":  # no chains: repair ends at the fully emptied plan
        assert not engine.score(everything(program, mode, 1)).feasible


def test_nothing_is_evicted_if_the_program_fits() -> None:
    graph = graph_of(pyramid(8, 0), 1.0)
    all_evicted = np.where(graph.allowed[:, 1:].any(1), graph.allowed[:, 1:].argmax(1) + 1, Choice.RESIDENT)
    assert len(rows_of_kinds(graph, all_evicted)) == len(graph)
    likely = np.full((len(graph), 4), 0.25, np.float32)
    rows = fit(Engine(pyramid(8, 0), MACHINE, graph.limit), graph, all_evicted, likely)
    assert rows is not None and len(rows) == 0


@pytest.mark.parametrize("name", ["policy", "policy_search"])
@given(program=networks(), fraction=st.floats(0.3, 1.0))
def test_there_is_a_plan_where_a_heuristic_has_one(name: str, program: Program, fraction: float) -> None:
    limit = max(int(fraction * program.peak_bytes), 1)
    try:
        plan = planned(name, program, MACHINE, limit)
    except Infeasible:
        for heuristic in heuristics():
            with pytest.raises(Infeasible):
                planned(heuristic, program, MACHINE, limit)
    else:
        assert simulate(program, plan, MACHINE, limit).peak_bytes <= limit


def test_the_plan_does_not_depend_on_the_cores() -> None:
    program = pyramid(12, 0)
    limit = int(0.6 * program.peak_bytes)
    cores = [agents.make("policy_search", min_bytes=1, calls=300, jobs=jobs) for jobs in (1, 4)]
    assert len({p.plan(program, MACHINE, limit).decisions for p in cores}) == 1


def test_shipped_weights_beat_the_search_without_the_network() -> None:
    """Compares at equal calls on MobileNet and an H100, neither in the training data, over seeds."""
    machine = Machine.load("h100")
    program = bundled("mobilenet", machine)
    limit = program.peak_bytes // 2

    def overhead(guide: bool) -> float:
        plans = [
            agents.make("policy_search", calls=500, seed=s, guide=guide).plan(program, machine, limit) for s in range(2)
        ]
        return float(np.mean([simulate(program, plan, machine, limit).overhead for plan in plans]))

    assert overhead(guide=True) < overhead(guide=False) - 0.005
    assert WEIGHTS.stat().st_size <= 3 * 10**6


def test_weights_are_checked(tmp_path: Path) -> None:
    program = pyramid(6, 0)
    graph = graph_of(program, 0.6)
    good = tmp_path / "good.pt"
    cut = tmp_path / "cut.pt"
    foreign = tmp_path / "other.pt"
    save_weights(random_net(graph), good)
    assert trained(good).settings["width"] == 16
    planned("policy", program, MACHINE, graph.limit, weights=good)
    cut.write_bytes(good.read_bytes()[:1000])
    torch.save({"weights": {}}, foreign)
    for path, word in ((cut, "damaged"), (foreign, "damaged"), (tmp_path / "none.pt", "No such file")):
        with pytest.raises(FormatError, match=word) as error:
            planned("policy_search", program, MACHINE, graph.limit, weights=path)
        assert str(path) in str(error.value)


def test_the_network_is_used_if_it_takes_less_than_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5-small (2,619 gaps, 3,438 kernels; 0.10 s of the network) is searched with the network within 0.5 s."""
    t5 = Moves.__new__(Moves)
    t5.gaps = [Gap(0, 0, 2)] * 2_619
    t5._current = PlanArrays(np.empty((0, 6), np.int64), np.empty(0, np.bool_), np.empty(3_438, np.int64))
    monkeypatch.setattr(policy.time, "monotonic", lambda: 100.0)
    assert not policy._too_large(t5, 100.4) and not policy._too_large(t5, None)
    assert policy._too_large(t5, 100.1)
