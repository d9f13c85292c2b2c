"""Profiles: every kernel runs alone, indices stay in range, and a profile fits one program only."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from executor import capture
from executor.capture.profile import PROFILES, Profile, ProfileError, _Runner, measure, path_of, shape_of, with_profile
from simulator import Kernel, Machine, Program, Tensor
from simulator.files import FormatError

PROGRAM = Program(
    "two", (Tensor("w", 8, "parameter", True), Tensor("x", 4)),
    (Kernel("a", "conv", "forward", (0,), (1,), 5, workspace=7, variants=((5, 7), (9, 0))),
     Kernel("b", "conv", "backward", (0, 1), (0,), 6)),
)  # fmt: skip
PROFILE = Profile("two", shape_of(PROGRAM).fingerprint, "m", "some device", "2.0", (30, 40), (1, 2))


class Sequences(nn.Module):
    """Embedding, LSTM, linear: indices in, and a kernel that keeps bytes of its own form for its way back."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


class Images(nn.Module):
    """Convolution, norm, max-pool, dropout, twice the same convolution."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def captured(kind=Images, optimizer=torch.optim.AdamW, device="cpu"):
    x = torch.randint(10, (2, 3), device=device) if kind is Sequences else torch.randn(2, 3, 8, 8, device=device)
    model = kind().to(device)
    batch = x, torch.randint(5, (2,), device=device)
    return capture(model, nn.CrossEntropyLoss(), optimizer(model.parameters()), batch)


@pytest.mark.parametrize("kind", [Sequences, Images])
def test_every_kernel_of_a_step_is_measured(kind):
    step = captured(kind)
    before = [p.clone() for p in step.sources if p is not None]
    profile = measure(step, "cpu", "here", repeats=2)
    assert len(profile.durations_ns) == len(step.program.kernels) and profile.workspaces is None
    for ns, nodes in zip(profile.durations_ns, step.nodes, strict=True):
        assert (ns > 0) == bool(nodes)  # a marker takes no time
    assert all(torch.equal(a, b) for a, b in zip(before, [p for p in step.sources if p is not None], strict=True))
    program = with_profile(step.program, profile)
    assert program.ideal_ns == sum(profile.durations_ns)
    assert with_profile(program, profile) == program  # a profile fits whatever the durations are


def test_a_longer_kernel_takes_longer():
    def of(width):
        model = nn.Linear(width, width)
        batch = torch.randn(256, width), torch.randn(256, width)
        return measure(capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch), "cpu", repeats=25)

    assert max(of(512).durations_ns) > 2 * max(of(16).durations_ns)  # 1024 times as many operations


def test_indices_are_in_range_and_not_all_the_same():
    step = captured(Sequences)
    run = _Runner(step, torch.device("cpu"), 1)
    (embedding,) = [n[0] for n in step.nodes if n and "embedding.default" in str(n[0].target)]
    drawn = torch.cat([run._inputs(embedding)[0][1].flatten() for _ in range(20)])
    assert drawn.min() >= 0 and drawn.max() < 10 and len(drawn.unique()) > 5


def test_equal_kernels_are_measured_once():
    step = captured()
    run = _Runner(step, torch.device("cpu"), 1)
    convolutions = [k for k, n in enumerate(step.nodes) if n and str(n[0].target) == "aten.convolution.default"]
    assert len({run._key(step.nodes[k][0]) for k in convolutions}) == 2 and len(convolutions) == 3


def test_a_kernel_that_fails_is_named():
    step = captured()
    nodes = list(step.nodes)
    k = next(k for k, n in enumerate(nodes) if n and str(n[0].target) == "aten.addmm.default")
    node = nodes[k][0]
    node.args = (node.args[0], node.args[2], node.args[1])  # 64x5 times 2x64
    with pytest.raises(ProfileError, match=rf"kernel {k} \(aten.addmm.default\) cannot be run alone: "):
        measure(replace(step, nodes=tuple(nodes)), "cpu", repeats=1)


def test_the_time_may_be_over():
    step = captured()
    with pytest.raises(ProfileError, match=rf"^the time for profiling was over at kernel 0 of {len(step.nodes)}$"):
        measure(step, "cpu", repeats=1, seconds=-1)


def test_durations_and_workspaces_are_put_in():
    # 30 + 40 in place of 5 + 6; variants of another scale go.
    program = with_profile(PROGRAM, PROFILE)
    assert [(k.duration_ns, k.workspace, k.variants) for k in program.kernels] == [(30, 1, ()), (40, 2, ())]
    unknown = with_profile(PROGRAM, replace(PROFILE, workspaces=None))
    assert [(k.duration_ns, k.workspace) for k in unknown.kernels] == [(30, 7), (40, 0)]


def test_another_programs_profile_is_refused():
    other = Program("two", (Tensor("w", 8, "parameter", True), Tensor("x", 5)), PROGRAM.kernels)
    with pytest.raises(FormatError, match=r"^the profile is of another program \('two', fingerprint "):
        with_profile(other, PROFILE)


@pytest.mark.parametrize("profile", [PROFILE, replace(PROFILE, workspaces=None)])
def test_a_profile_is_data(tmp_path, profile):
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    assert path_of(replace(profile, program="a/b c")) == PROFILES / "a_b_c-m.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "profile/2"}, "profile.format: expected 'profile/1', got 'profile/2'"),
        ({"durations_ns": [1, "2"]}, r"profile.durations_ns\[1\]: expected an integer"),
        ({"durations_ns": [1, -2]}, r"profile.durations_ns\[1\]: expected an integer of at least 0, got -2"),
        ({"workspaces": [1]}, "profile.workspaces: expected 2 integers, got 1"),
        ({"colour": 1}, "profile: unknown key 'colour'"),
    ],
)
def test_malformed_profiles(change, message):
    with pytest.raises(FormatError, match=message):
        Profile.from_dict({**PROFILE.to_dict(), **change})


def test_bad_options():
    with pytest.raises(ValueError, match="repeats: expected at least 1, got 0"):
        measure(captured(), "cpu", repeats=0)
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="there is no CUDA GPU to profile on"):
            measure(captured(), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", [Sequences, Images])
def test_on_a_gpu(kind):
    step = captured(kind, device="cuda")
    before = torch.cuda.memory_allocated()
    profile = measure(step, "cuda")
    assert torch.cuda.memory_allocated() - before < 2**26  # nothing but what libraries keep
    assert all((ns > 0) == bool(nodes) for ns, nodes in zip(profile.durations_ns, step.nodes, strict=True))
    assert profile.workspaces is not None and len(profile.workspaces) == len(step.nodes)
    assert with_profile(step.program.with_durations(profile.durations_ns), profile).ideal_ns > 0
    measure(captured(Images), "cuda", str(Machine.load("h200").name), repeats=2)  # captured on the CPU
