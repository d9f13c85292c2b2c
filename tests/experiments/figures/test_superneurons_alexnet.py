"""SuperNeurons' AlexNet: the accounting by hand, Table 1, the steps of Fig. 10, and the traffic of Table 3."""

from typing import Any

import pytest
import torch

from experiments import figures
from experiments.figures import layerwise, superneurons_layers as made
from experiments.figures.figure import Figure
from experiments.figures.layerwise import MB, Layer
from experiments.workloads.vgg import AlexNet
from simulator import Machine, Plan, Swap
from tests.experiments.conftest import figure_settings

MACHINE = Machine.load("k40c")
ALEXNET = layerwise.program("alexnet", layerwise.alexnet(), 200)
# Batch 1, 256 numbers = 1 KiB: CONV a (1 KiB), RELU b (1), POOL c (0.5), CONV d (0.5), softmax e (0.5).
TINY = [
    Layer("a", "conv", 256, ()),
    Layer("b", "activation", 256, (0,)),
    Layer("c", "pool", 128, (1,)),
    Layer("d", "conv", 128, (2,)),
    Layer("e", "other", 128, (3,)),
]


def rows(figure: Figure, **more: Any) -> list[dict[str, Any]]:
    tasks = figure.tasks(figure_settings(figure.name, **more))
    return [{**task, **figure.run(task, MACHINE)} for task in tasks]


def test_a_tiny_network_by_hand() -> None:
    program = layerwise.program("tiny", TINY, 1, image=64)
    # Outputs a 1024, b 1024, c 512, d 512, e 512; gradients of the inputs of d 512, c 1024 (in which b's is, too), and
    # a 256, the images'. e's gradient is in e.
    assert [(t.name, t.nbytes) for t in program.tensors] == [
        ("a", 1024), ("b", 1024), ("c", 512), ("d", 512), ("e", 512),
        ("gradient of d's input", 512), ("gradient of c's input", 1024), ("gradient of a's input", 256),
    ]  # fmt: skip
    assert [k.name for k in program.kernels] == ["a", "b", "c", "d", "e", "e", "d", "c", "b", "a"]
    steps, again, peak = layerwise.steps(program, Plan())
    assert again == 0 and peak == program.peak_bytes
    # d is read by e's two steps only, c by d's step and its own. e backward: a, b, c, d, e; d backward: a, b, c, e and
    # the new gradient; c backward: a, b, c and both gradients; b backward: a, b and one gradient; a backward: that
    # and 256 bytes more.
    assert [s.nbytes for s in steps] == [1024, 2048, 2560, 3072, 3584, 3584, 3584, 4096, 3072, 1280]
    assert [len(s.tensors) for s in steps] == [1, 2, 3, 4, 5, 5, 5, 5, 3, 2]
    # a goes to the host behind b, and comes back when d's backward step begins (step 7): away in steps 3 to 6.
    offloaded = [s.nbytes for s in layerwise.steps(program, layerwise.plan(program))[0]]
    assert offloaded == [1024, 2048, 1536, 2048, 2560, 2560, 3584, 4096, 3072, 1280]
    # b and c dropped, too, behind c and d. Step 7 runs b and c again for c; speed-centric keeps b.
    for strategy, runs, after in (("speed", 2, 4096), ("memory", 3, 4096)):
        steps, again, _ = layerwise.steps(program, layerwise.plan(program, strategy=strategy))
        # Step 7: a 1024, c 512, e 512, gradient 512, and b 1024 where it is kept.
        assert again == runs and steps[6].nbytes == (3584 if strategy == "speed" else 2560)
        assert steps[7].nbytes == after
    with pytest.raises(ValueError, match="strategy: expected one of cost, speed, memory, got 'fast'"):
        layerwise.plan(program, strategy="fast")


def test_forks_and_joins_by_hand() -> None:
    # fork(CONV a) -> CONV l, BN r -> join -> softmax. Forward: right branch first, as listed.
    layers = [
        Layer("a", "conv", 256, ()), Layer("f", "copy", 256, (0,)), Layer("r", "norm", 256, (1,)),
        Layer("l", "conv", 256, (1,)), Layer("j", "elementwise", 256, (3, 2)), Layer("e", "other", 256, (4,)),
    ]  # fmt: skip
    assert [layers[i].name for i in layerwise.backward_order(layers)] == ["e", "j", "r", "l", "f", "a"]
    program = layerwise.program("branches", layers, 1)
    names = [t.name for t in program.tensors]
    assert names[:3] == ["a", "f for r", "f for l"]
    backward = {k.name: k for k in program.kernels if k.phase == "backward"}
    # The first branch's gradient is the join's own, which softmax left in e; the second has a copy.
    assert [names[t] for t in backward["j"].inputs] == ["e"]
    assert [names[t] for t in backward["j"].outputs] == ["gradient of j's input 1"]
    assert [names[t] for t in backward["r"].inputs] == ["f for r", "gradient of j's input 1"]
    assert [names[t] for t in backward["l"].inputs] == ["f for l", "e"]
    assert {names[t] for t in backward["f"].inputs} == {"gradient of r's input", "gradient of l's input"}
    assert len(backward["f"].outputs) == 1


def test_alexnet_is_the_network_that_pytorch_trains() -> None:
    with torch.device("meta"):
        model, x = AlexNet(), torch.empty(2, 3, 227, 227)
        sizes = {}
        for name, layer in model.named_children():
            x = layer(x)
            sizes[name.upper()] = x.numel() // 2
    sizes.pop("FLATTEN")
    assert sizes == {layer.name: layer.floats for layer in layerwise.alexnet()[:-1]}
    # CONV 34,944 + 614,656 + 885,120 + 1,327,488 + 884,992; FC 37,752,832 + 16,781,312 + 4,097,000.
    assert sum(p.numel() for p in model.parameters()) == 62_378_344


def test_table_1() -> None:
    found = rows(made.Table1(), networks=["alexnet", "resnet50"])
    by_key = {(row["network"], row["strategy"]): row for row in found}
    assert all(row["again"] == made.TABLE1_PAPER[n][s][0] for (n, s), row in by_key.items())
    # A = 200 * 96 * 55 * 55 floats, B = 200 * 96 * 27 * 27: 4 A + 2 B and 4 A.
    a, b = 200 * 96 * 55 * 55 * 4, 200 * 96 * 27 * 27 * 4
    assert by_key["alexnet", "speed"]["peak"] == 4 * a + 2 * b
    assert by_key["alexnet", "memory"]["peak"] == by_key["alexnet", "cost"]["peak"] == 4 * a
    # The same of ResNet50, A = 32 * 64 * 114 * 114, B = 32 * 64 * 56 * 56: 455.125 MB, and 406.125 for the paper's 401.
    a, b = 32 * 64 * 114 * 114 * 4, 32 * 64 * 56 * 56 * 4
    assert by_key["resnet50", "speed"]["peak"] == 4 * a + 2 * b == 455.125 * MB
    assert by_key["resnet50", "memory"]["peak"] == by_key["resnet50", "cost"]["peak"] == 4 * a == 406.125 * MB
    assert all(row["planner"] == row["peak"] for row in found)
    _, cells, _ = made.Table1().say(found)
    assert cells[0][1:6] == ["14", "14", "993.018", "993.018", "POOL1 backward"]
    said = made.Table1().numbers(found)
    assert (said["same"], said["close"], said["missing"], said["exact"]) == (6, 4, 5.125, "to the byte")
    program = layerwise.program("resnet50", layerwise.resnet(3, 4, 6, 3), 32)
    assert round(5.125 * MB) not in {t.nbytes for t in program.tensors}  # nothing explains the paper's 401 MB


def test_fig_10() -> None:
    found = rows(made.Fig10(), shown=["liveness", "offload", "recompute"])
    ours = made.found(found)
    assert ours.keys() >= made.FIG10_PAPER.keys()
    differ = {
        key for key, paper in made.FIG10_PAPER.items() if abs(ours[key] - paper) >= (0.0011 if "MB" in key else 0.5)
    }
    assert differ == {"offload, MB", "offload, MB at step 32", "recompute, MB"}  # the last, 886, is in full MB
    sizes = {t.name: t.nbytes / MB for t in ALEXNET.tensors}
    # The nine tensors at POOL2: 2 CONV1's, POOL1's, 4 CONV2's (one a gradient), 2 POOL2's.
    nine = 2 * sizes["CONV1"] + sizes["POOL1"] + 4 * sizes["CONV2"] + 2 * sizes["POOL2"]
    assert ours["offload, MB"] == pytest.approx(nine) and round(nine, 3) == 1132.056
    # 1489.355 less what is named as offloaded; the paper leaves CONV4 in.
    named = ["CONV1", "CONV2", "CONV3", "CONV4"]
    assert ours["offload, MB at step 32"] == pytest.approx(ours["liveness, MB"] - sum(sizes[n] for n in named))
    assert made.FIG10_PAPER["offload, MB at step 32"] == pytest.approx(
        ours["offload, MB at step 32"] + sizes["CONV4"], abs=0.05
    )
    _, cells, _ = made.Fig10().say(found)
    assert len(cells) == len(made.FIG10_PAPER)
    assert cells[2] == ["liveness analysis: peak, MB", "1,489.355", "1,489.355", ""]


def test_what_pytorch_keeps() -> None:
    row = {"shown": "captured", "batch_size": 2, **made.captured(2, MACHINE)}
    program = figures.program("alexnet", MACHINE, batch_size=2)
    kept = sum(t.nbytes for t in program.tensors if t.persistent)
    assert row["kept"] == kept and row["peak"] == program.peak_bytes - kept == sum(n for *_, n in row["at_peak"])
    assert row["peaks"]["liveness"] == row["peak"] >= row["peaks"]["offload"] >= row["peaks"]["recompute"]
    assert len(row["steps"]) == len(program.kernels) and max(s[2] for s in row["steps"]) == row["peak"]


def test_table_3() -> None:
    found = rows(made.Table3(), batches=[256, 1024, 1792])
    small, large, beyond = found
    # CONV outputs of an image: 96*55*55 + 256*27*27 + 2*384*13*13 + 256*13*13 = 650,080 floats, out and in.
    assert small["copied"] == 256 * 650_080 * 4 * 2 and large["copied"] == 4 * small["copied"]
    assert small["cached"] == large["cached"] == 0 and 0 < beyond["cached"] < beyond["copied"]
    assert small["weights"] == 62_378_344 * 4
    # Of the peak, 17 tensors are proportional to the batch.
    first = made.limit(small)
    assert first == made.limit(large) and 1024 < first < 1792
    per_image = ALEXNET.peak_bytes // 200
    assert 3 * small["weights"] + first * per_image <= MACHINE.memory_bytes
    assert 3 * small["weights"] + (first + 1) * per_image > MACHINE.memory_bytes
    _, cells, _ = made.Table3().say(found)
    assert cells[0][:5] == ["256", "2.56", "1.33", "0.00", "0.00"] and cells[2][1] == ""
    assert made.Table3().numbers(found)["free"] == large["memory"] - large["peak"]
    assert made.Table3().say([{**small, "cached": None}])[1][0][4] == "does not fit"
    assert made.copied(ALEXNET, Plan((Swap(0, 1, 44),))) == 2 * ALEXNET.tensors[0].nbytes  # both ways
