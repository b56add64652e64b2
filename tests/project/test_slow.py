"""Which mutations ``make test`` runs: those of changed kernel files and of what includes them."""
from tests import slow


def test_files_that_include_what_changed():
    texts = {"a.cuh": "", "b.cuh": '#include "a.cuh"\n', "sm90/c.cu": '#include "b.cuh"\n', "d.cu": ""}
    assert slow.including({"a.cuh"}, texts) == {"a.cuh", "b.cuh", "sm90/c.cu"}
    assert slow.including({"d.cu"}, texts) == {"d.cu"} and slow.including(set(), texts) == set()


def test_included_names_are_those_of_files():
    files = {path.relative_to(slow.KERNELS).as_posix(): path.read_text() for path in slow.KERNELS.rglob("*.cu*")}
    assert {"sm80/forward.cu", "sm90/forward.cu"} < slow.including({"common/arch.cuh"}, files) <= set(files)


def test_changes_are_those_of_a_commit(monkeypatch):
    monkeypatch.setenv("CUPY_DMA_BASE", "no such commit")
    assert slow.changed_kernels() == set()
