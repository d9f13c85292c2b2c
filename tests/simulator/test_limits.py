"""Tests memory limits in the forms that users write."""

import numpy as np
import pytest

from simulator import FormatError, Kernel, Machine, Program, Tensor
from simulator.limits import check_limit, limit_bytes, size_bytes

PROGRAM = Program("one", (Tensor("a", 10**9),), (Kernel("k", "other", "forward", (), (0,), 1),))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (1.0, 1.0),
        (12345, 12345),
        (2e6, 2_000_000),
        ("50%", 0.5),
        ("65 %", 0.65),
        ("100%", 1.0),
        (np.float64(0.25), 0.25),
        (np.int64(7000), 7000),
        ("0.6", 0.6),
        ("1", 1.0),
        ("4096", 4096),
    ],
)
def test_a_limit_is_a_fraction_of_the_peak_or_bytes(value: object, expected: float) -> None:
    want = int(PROGRAM.peak_bytes * expected) if expected <= 1 else expected
    assert limit_bytes(value, PROGRAM) == want


def test_a_single_letter_is_refused_with_the_sizes_that_it_may_mean() -> None:
    for read in (size_bytes, check_limit, lambda value: limit_bytes(value, PROGRAM)):
        with pytest.raises(FormatError, match=r"got '2G'; was 2GiB or 2GB meant\?$"):
            read("2G")
    with pytest.raises(FormatError, match=r"got '1.5k'; was 1.5KiB or 1.5kB meant\?$"):
        size_bytes("1.5k")
    with pytest.raises(FormatError, match=r"got '2x'$"):
        size_bytes("2x")


def test_a_limit_is_checked_without_its_program() -> None:
    for value in (0.5, "80%", "24GiB", 4096):
        check_limit(value)
    for value in ("24", 24, "abc", 0, 1.5, True):
        with pytest.raises(FormatError, match=r"^limit: "):
            check_limit(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("500MB", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        (".5MiB", 2**19),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("1B", 1),
        (" 8gib ", 2**33),
        ("0.1234567891GB", 123_456_789),
        ("0.07GB", 70_000_000),
    ],
)
def test_a_limit_is_a_size(value: str, expected: int) -> None:
    assert limit_bytes(value, PROGRAM) == size_bytes(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        1500.5,
        "abc",
        None,
        True,
        float("nan"),
        float("inf"),
        2**63,
        "24G",
        "-1GB",
        "GB",
        "1,5GB",
        "0B",
        "0.1B",
        "0%",
        "101%",
        "1e3MB",
        "1 G B",
        "99999999TiB",
        [],
        np.True_,
    ],
)
def test_any_other_limit_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match=r"^limit: expected a positive fraction .* or a size such as 24GiB, .* got"):
        limit_bytes(value, PROGRAM)


@pytest.mark.parametrize("value", [0.5, "50%", 0, True, None, "0.6", "12G"])
def test_a_size_is_no_fraction(value: object) -> None:
    with pytest.raises(FormatError, match="capacity: expected an integer"):
        size_bytes(value, "capacity")


@pytest.mark.parametrize("value", [24, "24", 1.5, np.int64(7), 1023])
def test_a_number_too_small_for_bytes_asks_whether_gib_were_meant(value: object) -> None:
    for parse in (lambda: limit_bytes(value, PROGRAM, "memory"), lambda: size_bytes(value, "memory")):
        with pytest.raises(FormatError, match=rf"^memory: {value} would be {value} bytes; was {value}GiB meant\?$"):
            parse()
    tiny = Program("tiny", (Tensor("a", 1023),), PROGRAM.kernels)
    assert value == 1.5 or limit_bytes(value, tiny) == int(value)
    assert limit_bytes(f"{value}GiB", PROGRAM) == float(value) * 2**30
    assert value == 1.5 or size_bytes(value, least=1) == int(value)  # of what may be small, as a file's capacity


def test_sizes_of_a_machine_may_have_units() -> None:
    preset = Machine.load("h100").to_dict()
    found = Machine.from_dict({**preset, "host_bytes": "96GiB", "memory_bytes": "24GiB"})
    assert (found.host_bytes, found.memory_bytes) == (96 * 2**30, 24 * 2**30)
    with pytest.raises(FormatError, match=r"machine\.host_bytes: expected an integer"):
        Machine.from_dict({**preset, "host_bytes": "96G"})
