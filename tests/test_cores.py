"""A container's share of the processor counts, whichever kind of cgroup says it."""

from pathlib import Path

import pytest

from soloist.cores import usable_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_a_quota_is_a_limit(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable_cores(tmp_path) == (expected or 16)


def test_a_thread_that_openmp_has_bound_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert usable_cores(tmp_path) == 1
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert usable_cores(tmp_path) == 16
