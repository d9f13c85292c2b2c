"""What others measured: what is taken, what is refused and why, and that nothing is half-written."""

import json
import shutil

import pytest

from experiments.measured import add, traces
from experiments.measured.__main__ import main
from simulator.files import FormatError
from tests.experiments.measured.conftest import ORIGINAL


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_contributed_step_is_put_beside_the_others(data, step_file, capsys):
    assert main(["add", str(step_file)]) == 0
    out = capsys.readouterr().out
    assert listed(data)[-1] == "nvidia_h100_80gb_hbm3-small.json" and out.splitlines()[-1].endswith("-small.json")
    assert (data / listed(data)[-1]).read_text() == step_file.read_text()
    assert "ours" in out and "(-50.0%)" in out  # its times are twice ours


def test_with_check_nothing_is_written(data, step_file, capsys):
    before = listed(data)
    assert main(["add", str(step_file), "--check"]) == 0
    assert listed(data) == before and "(-50.0%)" in capsys.readouterr().out


def test_the_same_twice_is_refused_and_another_gets_a_number(data, step_file, capsys):
    assert main(["add", str(step_file)]) == 0
    assert main(["add", str(step_file)]) == 2
    assert "it is there already, as nvidia_h100_80gb_hbm3-small.json" in capsys.readouterr().err
    other = json.loads(step_file.read_text())
    step_file.write_text(json.dumps({**other, "step_ns": 3}))
    assert main(["add", str(step_file)]) == 0
    assert "nvidia_h100_80gb_hbm3-small-2.json" in listed(data)


def test_a_trace_is_taken_with_what_says_of_it(data, tmp_path, capsys):
    for ending in ("csv", "yaml"):
        shutil.copy(ORIGINAL / f"h100_resnet50.{ending}", tmp_path / f"mine.{ending}")
    assert main(["add", str(tmp_path / "mine.csv")]) == 2
    assert "it is there already, as h100_resnet50.csv" in capsys.readouterr().err
    for path in data.iterdir():
        path.unlink()
    assert main(["add", str(tmp_path / "mine.csv")]) == 0
    assert listed(data) == ["nvidia_h100_80gb_hbm3-resnet_imagenet_adam.csv",
                            "nvidia_h100_80gb_hbm3-resnet_imagenet_adam.yaml"]  # fmt: skip
    assert "396 kernels, 70.72 ms" in capsys.readouterr().out


def test_what_cannot_be_written_leaves_nothing(data, tmp_path, monkeypatch):
    for ending in ("csv", "yaml"):
        shutil.copy(ORIGINAL / f"h100_resnet50.{ending}", tmp_path / f"mine.{ending}")
        (data / f"h100_resnet50.{ending}").unlink()
    checked = add.check(tmp_path / "mine.csv")
    written = []

    def full(path, text):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.write_text(text)

    monkeypatch.setattr(add, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        add.add(checked)
    assert written and listed(data) == []


def test_without_a_checkout_there_is_nowhere_to_put_it(data, step_file, monkeypatch):
    monkeypatch.setattr(traces, "DATA", data / "nowhere")
    with pytest.raises(FormatError, match="nowhere is not there: files are added to a checkout"):
        add.add(add.check(step_file))


CHROME = '{\n "schemaVersion": 1,\n "traceEvents": []\n}'
SNAPSHOT = '{"segments": [],\n "device_traces": []}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", CHROME.encode(), "line 3: a Chrome trace, as torch.profiler and Kineto write it; expected"),
        ("a.json", SNAPSHOT.encode(), "line 2: an allocator snapshot of PyTorch; expected"),
        ("a.json", b'{"format": "profile/1",\n"durations_ns": []}', "line 2: a profile/1, which has no operators"),
        ("a.json", b'{\n"format": "measured/1",\n', "line 3: not JSON"),
        ("a.json", b"[1, 2]", "line 1: no measured step, as it has no format"),
        ("a.pickle", b"\x80\x04\x95\x00\xff", r"line 1: not text \(a pickle, such as an allocator snap"),
        ("a.json", b'{\n\xff\xfe"', "line 2: not text; expected"),
        ("a.json", b'{\n"\0"', "line 2: not text; expected"),
        ("a.json", b'{"format": "measured/1", "who": "me"}', "a.json: measured: unknown key 'who'"),
        ("a.json", b'{"format": 3}', "a.json: measured.format: expected a string, got 3"),
        ("a.csv", b"stage,operator,us\nforward,aten::mm,fast\n", "line 2: could not convert string to float: 'fast'"),
        ("a.csv", b"traceEvents\n", "line 1: no trace of operators"),
        ("a.csv", b"stage,operator,us\nforward,aten::mm,1\n", "a trace needs a.yaml beside it, that says of which"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused(data, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    before = listed(data)
    assert main(["add", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and listed(data) == before
    with pytest.raises(FormatError, match=message):
        add.check(tmp_path / name)


def test_no_file(capsys, tmp_path):
    assert main(["add", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.json: cannot be read (No such file or directory)\n"


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(add, "MOST_BYTES", 10)
    (tmp_path / "a.json").write_text('{"format": 1}')
    with pytest.raises(FormatError, match="line 1: larger than"):
        add.check(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "rtx9090"}, "step.json: machine: there is no preset 'rtx9090' in configs/machine, which"),
        ({"device": "cpu (2)"}, "step.json: measured.device: 'cpu .2.' is no GPU"),
        ({"source": "jo@example.org"}, "step.json: measured.source: has an e-mail address"),
    ],
)  # fmt: skip
def test_entries_that_are_wrong_are_named(step_file, changes, message):
    step_file.write_text(json.dumps({**json.loads(step_file.read_text()), **changes}))
    with pytest.raises(FormatError, match=message):
        add.check(step_file)


TRACE = "stage,operator,us,input_elements\n"
ABOUT = (ORIGINAL / "h100_resnet50.yaml").read_text()


@pytest.mark.parametrize(
    ("rows", "about", "message"),
    [
        ("forward,aten::fft,9,\n", ABOUT, "line 2: operator 'aten::fft' is not known"),
        ("forward,aten::conv2d,9,\n" * 60, ABOUT, "line 55: the trace has more of aten::conv2d than the capture"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("MIT", "jo@a.org"), "trace.licence: has an e-mail address"),
        ("forward,aten::conv2d,9,\n", ABOUT + "host: box\n", "trace: unknown key 'host'"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("Adam", "Lion"), "trace.optimizer: expected one of SGD, Adam"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("h100", "h101"), "there is no preset 'h101'"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("resnet_imagenet", "resnets"), "network: workload.family: ex"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("family: resnet_imagenet", "target: os:abort"), "not run"),
        ("forward,aten::conv2d,9,\n", ABOUT.replace("trace/1", "trace/2"), "trace.format: expected 'trace/1'"),
        ("forward,aten::conv2d,9,\n", "{", "a.yaml: not YAML"),
    ],
)  # fmt: skip
def test_traces_that_are_wrong_are_named(tmp_path, rows, about, message):
    (tmp_path / "a.csv").write_text(TRACE + rows)
    (tmp_path / "a.yaml").write_text(about)
    with pytest.raises(FormatError, match=message):
        add.check(tmp_path / "a.csv")
