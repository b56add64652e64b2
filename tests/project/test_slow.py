"""Which mutations ``make test`` runs: those of changed kernel files and of what includes them."""
import pytest

from tests import slow


def test_files_that_include_what_changed():
    texts = {"a.cuh": "", "b.cuh": '#include "a.cuh"\n', "sm90/c.cu": '#include "b.cuh"\n', "d.cu": ""}
    assert slow.including({"a.cuh"}, texts) == {"a.cuh", "b.cuh", "sm90/c.cu"}
    assert slow.including({"d.cu"}, texts) == {"d.cu"} and slow.including(set(), texts) == set()


def test_included_names_are_those_of_files():
    files = {path.relative_to(slow.KERNELS).as_posix(): path.read_text() for path in slow.KERNELS.rglob("*.cu*")}
    assert {"sm80/forward.cu", "sm90/forward.cu"} < slow.including({"common/arch.cuh"}, files) <= set(files)


def test_shares_of_slow_tests_are_disjoint_and_complete():
    names = [f"tests/a.py::test[{i}]" for i in range(1000)]
    shares = [{name for name in names if slow.in_share(name, f"{i}/4")} for i in (1, 2, 3, 4)]
    assert set().union(*shares) == set(names) and sum(map(len, shares)) == len(names)
    assert min(map(len, shares)) > 200
    for wrong in ("0/4", "5/4"):
        with pytest.raises(pytest.UsageError, match="1 <= i <= n"):
            slow.in_share("a", wrong)
