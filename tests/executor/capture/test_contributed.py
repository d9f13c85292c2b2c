"""A measured step as others can read it: what is written, what is refused, and that the model says the same of it."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from executor import capture
from executor.capture.contributed import Contributed, contribution, modelled
from executor.capture.kernel_times import Precision
from executor.capture.profile import Profile, measure, shape_of
from simulator import FormatError, Machine

H100 = Machine.load("h100")


class MySecretNet(nn.Module):
    """Convolutions with and without a stride, batch norm, pooling, a product; a buffer that is masked with -inf."""

    def __init__(self):
        super().__init__()
        self.private_stem = nn.Conv2d(3, 8, 3, stride=2)
        self.rest = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.rest(self.private_stem(x)).mean((2, 3))
        return self.head(x.masked_fill(x > 9, -float("inf")).softmax(1))


@pytest.fixture(scope="module")
def captured():
    model = MySecretNet()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.randn(2, 3, 16, 16), torch.randint(4, (2,))
    return capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=H100, name="secret")


def profile_of(captured, **more):
    durations = tuple(range(1000, 1000 + len(captured.nodes)))
    shape = shape_of(captured.program)
    return replace(
        Profile("secret", shape.fingerprint, "h100", "NVIDIA H100 80GB HBM3", "2.9.0+cu130", durations), **more
    )


@pytest.fixture(scope="module")
def measured(captured):
    return contribution(captured, profile_of(captured), source="a test", licence="CC0-1.0", workload="net", step_ns=5)


def test_the_model_says_of_it_what_it_says_of_the_capture(captured, measured):
    of_nodes = [k.duration_ns for k, nodes in zip(captured.program.kernels, captured.nodes, strict=True) if nodes]
    assert modelled(measured, H100) == of_nodes
    slower = replace(H100, memory_bytes_per_s=10**9)
    assert modelled(measured, slower) == [
        k.duration_ns for k, nodes in zip(captured.on(slower).program.kernels, captured.nodes, strict=True) if nodes
    ]


def test_the_model_follows_the_precision_that_is_written(captured, measured):
    full = replace(measured, precision=Precision(conv_tf32=False, matmul_tf32=False))
    slow = replace(H100, flops_per_s={"float32": 10**9, "tf32": 10**15})
    assert sum(x or 0 for x in modelled(full, slow)) > 1.5 * sum(x or 0 for x in modelled(measured, slow))


def test_times_are_those_of_the_profile(captured, measured):
    wanted = [1000 + k for k, nodes in enumerate(captured.nodes) if nodes]
    assert [ns for _, _, ns, _ in measured.kernels] == wanted
    assert measured.kernels_ns == sum(wanted) and measured.step_ns == 5 and measured.context_bytes is None
    assert len(measured.operators) < len(measured.kernels)  # each is there once


def test_updates_of_many_parameters_are_one_kernel():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True)
    batch = torch.randn(2, 4), torch.randint(4, (2,))
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=H100)
    found = contribution(captured, profile_of(captured), source="a test", licence="CC0-1.0", workload="net")
    many = [i for i, (which, *_) in enumerate(found.kernels) if "_foreach_" in found.operators[which].name]
    of_nodes = [k.duration_ns for k, nodes in zip(captured.program.kernels, captured.nodes, strict=True) if nodes]
    assert many and [modelled(found, H100)[i] for i in many] == [of_nodes[i] for i in many]
    assert all(x < H100.kernel_times.launch_ns for i in many if (x := modelled(found, H100)[i]) is not None)


def test_json_and_back(measured):
    text = json.dumps(measured.to_dict())
    assert Contributed.from_dict(json.loads(text)) == Contributed.from_dict(measured.to_dict())
    assert Contributed.from_dict(json.loads(text)).to_dict() == measured.to_dict()
    assert "Infinity" not in text


def test_nothing_in_it_is_about_a_person(measured):
    text = json.dumps({**measured.to_dict(), "format": ""}).lower()
    for word in ("secret", "private", "stem", "head", "/", ".py", "weight"):
        assert word not in text, word


def test_a_real_profile_is_written(captured):
    profile = measure(captured, "cpu", "h100", repeats=1, cache="hot")
    found = contribution(captured, profile, source="a test", licence="CC0-1.0", workload="net", rates=H100)
    assert found.device.startswith("cpu") and found.cuda == "" and found.cudnn == ""
    assert found.rates is not None and found.rates["h2d_bytes_per_s"] == H100.h2d_bytes_per_s
    assert all(space is None for *_, space in found.kernels)


def test_a_profile_of_another_program_is_refused(captured):
    with pytest.raises(FormatError, match="the profile is of another program"):
        contribution(captured, profile_of(captured, durations_ns=(1,)), source="a", licence="b", workload="c")


def changed(measured, path, value):
    data = copy.deepcopy(measured.to_dict())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["source"], "measured by jo@example.org", "measured.source: has an e-mail address in it"),
        (["source"], "see /home/jo/runs", r"measured.source: has a path in it \('/h'\)"),
        (["source"], "C:\\runs", "measured.source: has a path in it"),
        (["licence"], "~jo/licence", "measured.licence: has a path in it"),
        (["source"], "two\nlines", "measured.source: expected one line"),
        (["source"], "", "measured.source: expected one line"),
        (["host"], "box", "measured: unknown key 'host'"),
        (["format"], "measured/2", "measured.format: expected 'measured/1'"),
        (["workload"], "/data/net", "measured.workload: expected a name of letters"),
        (["device"], "NVIDIA\n", "measured.device: expected the name of a device"),
        (["cache"], "warm", "measured.cache: expected one of cold, hot, step"),
        (["precision"], {"conv_tf32": True}, "measured.precision: missing key 'matmul_tf32'"),
        (["step_ns"], -1, "measured.step_ns: expected an integer of at least 0"),
        (["step_ns"], 1.5, "measured.step_ns: expected an integer of at least 0"),
        (["rates"], {"h2d_bytes_per_s": True}, "measured.rates.h2d_bytes_per_s: expected an integer"),
        (["rates"], {"user": 1}, "measured.rates: unknown key 'user'"),
        (["operators", 0, "name"], "mm", r"measured.operators\[0\].name: expected an operator"),
        (["operators", 0, "kind"], "gemm", r"measured.operators\[0\].kind: expected one of"),
        (["operators", 0, "arguments", 0], "mine", r"operators\[0\].arguments\[0\]: expected a tensor"),
        (["operators", 0, "arguments", 0], {"shape": [1], "stride": [], "dtype": "float32"}, "as many strides"),
        (["operators", 0, "arguments", 0, "dtype"], "nn", "dtype: PyTorch has no type 'nn'"),
        (["operators", 0, "arguments", 3], [float("nan")], r"arguments\[3\]\[0\]: expected a tensor, a number"),
        (["operators", 0, "named", "a b"], 1, "'a b' is no name of an argument"),
        (["operators", 0, "place"], "train.py:3", r"measured.operators\[0\]: unknown key 'place'"),
        (["kernels", 0], [0, "forward", 1], r"measured.kernels\[0\]: expected \[operator, phase, ns, workspace\]"),
        (["kernels", 0, 0], 10**6, r"measured.kernels\[0\]\[0\]: there is no operator 1000000"),
        (["kernels", 0, 1], "fwd", r"measured.kernels\[0\]\[1\]: expected one of"),
        (["kernels", 0, 2], -1, r"measured.kernels\[0\]\[2\]: expected an integer of at least 0"),
        (["kernels"], [], "measured.kernels: no kernel takes time"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(measured, path, value, message):
    with pytest.raises(FormatError, match=message):
        Contributed.from_dict(changed(measured, path, value))


@pytest.mark.parametrize("source", ["https://github.com/a/b at 3fb3c06", "A lab's TCP/IP box, 2025", "a/b, file c"])
def test_where_it_is_published_is_no_path(measured, source):
    assert Contributed.from_dict(changed(measured, ["source"], source)).source == source


def test_an_operator_that_cannot_be_called_so_is_named(measured):
    conv = next(i for i, o in enumerate(measured.operators) if o.name == "aten.convolution.default")
    wrong = Contributed.from_dict(changed(measured, ["operators", conv, "arguments"], [1]))
    with pytest.raises(FormatError, match=rf"measured.operators\[{conv}\]: aten.convolution.default cannot have been"):
        modelled(wrong, H100)


def test_an_operator_that_pytorch_does_not_have_is_left_out(measured):
    conv = next(i for i, o in enumerate(measured.operators) if o.name == "aten.convolution.default")
    other = Contributed.from_dict(changed(measured, ["operators", conv, "name"], "nolib.convolution.default"))
    said = modelled(other, H100)
    assert [ns is None for ns in said] == [which == conv for which, *_ in other.kernels]
